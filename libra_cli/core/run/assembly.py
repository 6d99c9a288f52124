"""The parts of a run, and how they are made of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import CurriculumSpec, RolloutSpec
from libra_cli.config.training import TrainingSpec
from libra_cli.core.algorithms.algorithm import Algorithm
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.model_servers import ModelServers
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.cluster.step_batch import StepBatch
from libra_cli.core.cluster.trainer import TrainerGroup
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.evaluation.ledger import (
    EvaluationLedger,
    evaluation_plans,
)
from libra_cli.core.launch.process import NUMBER_BYTES, Dtype, dtype_of
from libra_cli.core.launch.shares import serving_when_idle
from libra_cli.core.planning.controller import PlanController
from libra_cli.core.reconcile.reconciler import Reconciler
from libra_cli.core.rollout.active import Limits
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.staleness import rule_of
from libra_cli.core.rollout.trajectories import Trajectories
from libra_cli.core.run.state import RunIdentity, RunState
from libra_cli.core.sampling.curriculum import Curriculum
from libra_cli.core.sampling.dynamic import FilteredGroups
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, Tokens, Trajectory, TrajectoryId


def _ledger(
    algorithm: Algorithm, make: Callable[[TrajectoryId, Seconds], Trajectory], tasks: int
) -> GroupLedger:
    recipe = algorithm.recipe
    training, rollout = recipe.training, recipe.rollout
    most_filtered = rollout.most_filtered(training.groups_per_step)
    return GroupLedger(
        group_size=recipe.group_size,
        groups_per_step=training.groups_per_step,
        rule=rule_of(training),
        retries=0 if recipe.demonstrations else max(one.retries for one in recipe.environment),
        make=make,
        oversample=rollout.oversample,
        filtered=FilteredGroups(algorithm, most_filtered),
        curriculum=_curriculum(rollout.curriculum, tasks),
    )


def _curriculum(spec: CurriculumSpec | None, tasks: int) -> Curriculum | None:
    if spec is None:
        return None
    return Curriculum(spec.tasks or tasks, spec.low, spec.high, spec.revisit)


def _limits(rollout: RolloutSpec, max_len: Tokens) -> Limits:
    return Limits(
        rollout.max_turns,
        rollout.max_turn_tokens,
        max_len,
        penalty=rollout.overlong.penalty,
        buffer=rollout.overlong.buffer,
    )


def _workers(
    training: TrainingSpec, dtype: Dtype, train: Sequence[Slot], seed: int
) -> GradientWorkers:
    """The workers beside a trainer group on these slots; there are none yet. ``dtype`` is the
    number format of a version, ``seed`` the run's.
    """
    return GradientWorkers(
        sum(slot.num_devices for slot in train),
        NUMBER_BYTES[training.worker_gradients] / NUMBER_BYTES[dtype],
        shares_steps=training.shares_steps,
        whole_groups=training.needs.whole_groups,
        minibatches=training.minibatches,
        seed=seed,
    )


@dataclass(slots=True)
class RunParts:
    """The parts of a run, and the books that several of them write in."""

    recipe: Recipe
    run: RunState
    ledger: GroupLedger
    evaluations: EvaluationLedger
    scheduler: RequestScheduler
    servers: RolloutServers
    workers: GradientWorkers
    models: ModelServers
    training: TrainerGroup
    rollout: Trajectories
    reconciler: Reconciler
    controller: PlanController

    def check(self) -> None:
        """Invariants of each part that hold between any two events."""
        self.ledger.check()
        self.evaluations.check()
        self.servers.check()
        self.rollout.check()
        self.training.check()
        self.scheduler.check()
        self.workers.check()
        self.models.check()
        self.reconciler.check()


def assemble(
    algorithm: Algorithm,
    plan: Plan,
    slots: Sequence[Slot],
    identity: RunIdentity,
    *,
    policy: SchedulingPolicy,
    cost_of: Callable[[Bucket], ServerLaw],
    make: Callable[[TrajectoryId, Seconds], Trajectory],
    tasks: int,
) -> RunParts:
    """The parts of a run that has not begun. ``tasks`` are those of the recipe's files."""
    recipe = algorithm.recipe
    ledger = _ledger(algorithm, make, tasks)
    evaluations = EvaluationLedger(evaluation_plans(recipe), ledger.retries, make)
    scheduler = RequestScheduler(policy)
    when_idle = frozenset(serving_when_idle(recipe.nodes, slots))
    servers = RolloutServers(plan, slots, cost_of, when_idle, may_sleep=recipe.rollout.sleep)
    rollout = Trajectories(
        ledger,
        servers,
        scheduler,
        _limits(recipe.rollout, recipe.model.max_len),
        evaluations,
        needs_seats=not recipe.demonstrations,
        keeps_kv=not recipe.weight_sync.clear_cache,
        teacher=algorithm.objective.teacher(),
    )
    by_id = {slot.id: slot for slot in slots}
    train = [by_id[slot_id] for slot_id in plan.train]
    dtype = dtype_of(recipe.model, train)
    workers = _workers(recipe.training, dtype, train, recipe.run.seed)
    training = _trainer(algorithm, ledger, train)
    models = ModelServers(ledger.models)
    reconciler = Reconciler(servers, workers, models, training, plan, slots)
    return RunParts(
        recipe,
        RunState(identity, recipe.run.steps),
        ledger,
        evaluations,
        scheduler,
        servers,
        workers,
        models,
        training,
        rollout,
        reconciler,
        PlanController(recipe, reconciler, plan),
    )


def _trainer(algorithm: Algorithm, ledger: GroupLedger, train: Sequence[Slot]) -> TrainerGroup:
    """The trainer group on these slots; it is not started yet."""
    recipe = algorithm.recipe
    batch = StepBatch(
        ledger,
        algorithm,
        stream=recipe.training.stream,
        mask_truncated=recipe.rollout.overlong.mask,
        replay=algorithm.replay_buffer(),
    )
    return TrainerGroup(ledger, train, batch, checkpoint_every=recipe.training.checkpoint_every)
