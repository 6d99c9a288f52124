"""The one place where a run changes: ``handle(event, now) -> actions``.

The machine owns its parts and hands each event to the one it is about; after every event it
*settles*: slots go on towards the plan, expired groups go back to the queue, new groups are opened,
waiting requests get seats, a full batch goes to the trainer, and a run that has reached its end is
wound down. Nothing here reads a clock, a file or a random number, so production, the simulator and
the property tests all drive this very object.

    part        consumes                    waits for                     unblocked by
    reconciler  plans                       turns, shares, processes      ServerStopped, StepDone
    servers     servers, versions           a version to prove            VersionPublished
    workers     gradient workers, versions  a version to prove            VersionPublished
    rollout     prompts, seats              a seat; the staleness bound   TurnGenerated; the same
    training    ready groups                a full batch                  the last EpisodeAdvanced
    the end     everything stopped          processes verified gone       ServerStopped,
                                                                          TrainerStopped

Who changes whom: the controller gives the reconciler another plan, and the reconciler starts,
drains and stops what servers, workers and training hold; calls go this way down and no other.
Servers, workers, training and rollout never change one another, and nobody below changes the
reconciler: what one does that concerns another is a *notice* among its results, which the machine
hands on before it asks for the next result. Reading is free. Two books are written by several
hands: the ledger of groups (rollout opens and ends them, training claims them) and the scheduler
(rollout queues requests, the machine tells it which servers take some, and these keep the price and
the version of their queues).

Phases: STARTING -> RUNNING -> DRAINING -> STOPPING -> ENDED. In DRAINING nothing new begins, turns
and syncs under way may finish (for ``DRAIN_S`` at most), a step or a checkpoint under way may take
twice as long as the slowest so far, and one last checkpoint is written; in STOPPING every process
is stopped and verified gone. Whoever asks to stop at once skips DRAINING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import assert_never

from libra_cli.config.plugins import PluginGroup
from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import CurriculumSpec, RolloutSpec
from libra_cli.core import events as e
from libra_cli.core import notices as n
from libra_cli.core.actions import Action, AnswerOrder, End, Save, Wake
from libra_cli.core.algorithms.algorithm import Algorithm, algorithm_of
from libra_cli.core.cluster import replica_set
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.replica import Replica
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.cluster.trainer import TIMER, TrainerGroup, TrainerState
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.server import guessed_cost
from libra_cli.core.evaluation.ledger import (
    EvaluationLedger,
    EvaluationState,
    evaluation_plans,
)
from libra_cli.core.explanation import Explanation
from libra_cli.core.launch.process import NUMBER_BYTES, dtype_of
from libra_cli.core.observation import Observation
from libra_cli.core.planning.controller import PlanController
from libra_cli.core.reconcile import migration, reconciler
from libra_cli.core.reconcile.reconciler import Reconciler
from libra_cli.core.records import (
    EvaluationRecord,
    MoveRecord,
    PlanRecord,
    Record,
    StepRecord,
    VersionRecord,
)
from libra_cli.core.rollout import teaching
from libra_cli.core.rollout.active import Limits, Stage
from libra_cli.core.rollout.groups import GroupLedger, GroupState, new_trajectory
from libra_cli.core.rollout.once import dropped_in
from libra_cli.core.rollout.rows import group_record, group_records
from libra_cli.core.rollout.staleness import rule_of
from libra_cli.core.rollout.trajectories import Trajectories
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.run.router import NoticeRouter
from libra_cli.core.run.state import Phase, Resume, RunIdentity, RunState
from libra_cli.core.sampling.curriculum import Curriculum
from libra_cli.core.sampling.dynamic import FilteredGroups
from libra_cli.core.scheduling.policy import SchedulingPolicy, make_policy
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.types import (
    Bucket,
    Plan,
    Seconds,
    Slot,
    Tokens,
    Trajectory,
    TrajectoryId,
    node_of,
)
from libra_cli.core.warnings.rules import RuleBounds
from libra_cli.core.warnings.watch import LearningWatch

DRAIN_S: Seconds = 30.0
DRAIN_TIMER = "drain"
GONE_TIMER = "gone "
EVALUATION_TIMER = "evaluation"
STALLED_S: Seconds = 1800.0
"""Once nothing is trained any more, evaluations of which no turn has come back for so long are cut.
Chosen: a turn of 64,000 tokens takes less, at 40 a second."""
RESUME = "then: libra run RECIPE --resume RUN_DIR"
MAX_DROPPED = 32
"""Groups given up one after the other, with no trajectory finished in between."""


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
        filtered=FilteredGroups(algorithm.has_signal, most_filtered),
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


def _workers(recipe: Recipe, train: Sequence[Slot]) -> GradientWorkers:
    """The workers beside a trainer group on these slots; there are none yet."""
    training = recipe.training
    return GradientWorkers(
        sum(slot.num_devices for slot in train),
        NUMBER_BYTES[training.worker_gradients] / NUMBER_BYTES[dtype_of(recipe.model, train)],
        shares_steps=training.shares_steps,
        whole_groups=training.needs.whole_groups,
    )


class Machine:
    """The state of a run. ``handle`` is the only way in."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        slots: Sequence[Slot],
        identity: RunIdentity,
        *,
        resume: Resume | None = None,
        explanation: Explanation | None = None,
        algorithm: Algorithm | None = None,
        policy: SchedulingPolicy | None = None,
        cost_of: Callable[[Bucket], ServerLaw] | None = None,
        make: Callable[[TrajectoryId, Seconds], Trajectory] = new_trajectory,
        tasks: int = 0,
    ) -> None:
        """``tasks`` are those of the recipe's files, for a curriculum that goes through them."""
        self.recipe = recipe
        self.run = RunState(identity, recipe.run.steps)
        training = recipe.training
        self.algorithm = algorithm or algorithm_of(recipe, PluginGroup.find)
        self.ledger = _ledger(self.algorithm, make, tasks)
        self.evaluations = EvaluationLedger(evaluation_plans(recipe), self.ledger.retries, make)
        self.scheduler = RequestScheduler(policy or make_policy(recipe.scheduler.policy))
        self.servers = RolloutServers(plan, slots, cost_of or guessed_cost)
        self.rollout = Trajectories(
            self.ledger,
            self.servers,
            self.scheduler,
            _limits(recipe.rollout, recipe.model.max_len),
            self.evaluations,
            needs_seats=not recipe.demonstrations,
            teacher=self.algorithm.objective.teacher(),
        )
        by_id = {slot.id: slot for slot in slots}
        train = [by_id[slot_id] for slot_id in plan.train]
        self.workers = _workers(recipe, train)
        self.training = TrainerGroup(
            self.ledger,
            train,
            checkpoint_every=training.checkpoint_every,
            algorithm=self.algorithm,
            stream=training.stream,
            mask_truncated=recipe.rollout.overlong.mask,
            replay=self.algorithm.replay_buffer(),
        )
        self.reconciler = Reconciler(self.servers, self.workers, self.training, plan, slots)
        self._router = NoticeRouter(
            self.servers, self.workers, self.training, self.rollout, self.reconciler
        )
        self._agenda = self._router.agenda
        self.controller = PlanController(recipe, self.reconciler, plan)
        self._observer = RunObserver(recipe)
        self.warnings = LearningWatch(RuleBounds(training.max_grad_norm))
        self._first_explanation = explanation
        self._drains_since: Seconds = 0.0
        if resume is not None:
            self._begin_at(resume)

    def _begin_at(self, resume: Resume) -> None:
        """The run went on until a checkpoint, and from there on."""
        self.ledger.restore(resume.position, dropped=dropped_in(resume.records))
        self.training.remember(resume.checkpoint, int(resume.position["step"]))
        self.training.incarnation = resume.trainer_incarnation
        self.training.step = self.training.checkpoints.step
        self._remember(resume.records)

    def _remember(self, records: Sequence[Record]) -> None:
        """What the run has written before it goes on."""
        checkpoints = self.training.checkpoints
        for version in records:
            if isinstance(version, VersionRecord):
                checkpoints.begins(version.trainer_incarnation, version.version)
        for record in records:
            self._observer.saw(record)
            self.warnings.remember(record)
            if isinstance(record, StepRecord) and record.step <= self.training.step:
                checkpoints.learn_reward(record.step, record.reward)
            elif isinstance(record, EvaluationRecord) and record.step <= self.training.step:
                self._evaluated(record)
        plans = [record.plan for record in records if isinstance(record, PlanRecord)]
        moves = [record.move for record in records if isinstance(record, MoveRecord)]
        self.controller.number_on(max(plans, default=-1))
        self.reconciler.number_on(max(moves, default=0))
        self.evaluations.remember(records, self.training.step, checkpoints.still_holds)

    def handle(self, event: e.Event, *, now: Seconds) -> list[Action]:
        """Take in one event; return what is to be done, in order.

        Raises:
            IllegalMove: the event cannot happen in this state; that is a bug in libra.
        """
        if self.run.ended_at is not None:
            return []
        actions: list[Action] = []
        route = self._router.route
        route(self._take_in(event, now), actions, now)
        if self._is_quiet(event):
            route(self.rollout.dispatch(now=now), actions, now)
            self._see(actions)
            return actions
        self._settle(actions, now)
        if self._agenda.rows:
            actions += self._router.slot_rows(now, self.scheduler.waiting)
        self._see(actions)
        route(self.controller.look(self._observe), actions, now)
        row = self.run.changed_row(self.training.step, self.training.published, self._waiting())
        if row is not None:
            actions.insert(0, Save(row))
        if self.run.ended_at is not None:
            actions.append(End(self.run.outcome, self.run.error))  # closes the journal
        return actions

    def _see(self, actions: list[Action]) -> None:
        """Show the observer what is written, and the trainer what its checkpoints are worth."""
        for action in actions:
            if isinstance(action, Save):
                self._observer.saw(action.record)
                if isinstance(action.record, EvaluationRecord):
                    self._evaluated(action.record)

    def _evaluated(self, record: EvaluationRecord) -> None:
        """The first evaluation of the recipe is what checkpoints are scored by."""
        if record.name not in self.recipe.evaluation_names[:1]:
            return
        checkpoints = self.training.checkpoints
        if record.state == EvaluationState.RUNNING:
            checkpoints.evaluation_began(record.step)
        else:
            checkpoints.evaluation_ended(record.step, record.score, record.trainer_incarnation)

    @property
    def phase(self) -> Phase:
        """Where the run is."""
        return self.run.phase

    @property
    def _going(self) -> bool:
        phase = self.run.phase
        return phase is Phase.RUNNING or phase is Phase.STARTING

    # -- events -----------------------------------------------------------------------------------

    def _take_in(self, event: e.Event, now: Seconds) -> Iterable[n.Result]:
        match event:
            case (
                e.TurnGenerated()
                | e.TurnFailed()
                | e.EpisodeStarted()
                | e.DemonstrationRead()
                | e.EpisodeAdvanced()
                | e.EpisodeFailed()
                | e.TeacherAnswered()
                | e.TeacherFailed()
            ):
                return self.rollout.handle(event, now=now)
            case (
                e.ServerStarted()
                | e.ServerFailed()
                | e.ServerChecked()
                | e.ServerStopped()
                | e.ServerSynced()
                | e.SyncFailed()
                | e.ServerSampled()
            ):
                return self.servers.handle(event, self._should_restart, now=now)
            case (
                e.WorkerStarted()
                | e.WorkerFailed()
                | e.WorkerStopped()
                | e.WorkerSynced()
                | e.WorkerSyncFailed()
            ):
                return self.workers.handle(event, self._should_restart, now=now)
            case (
                e.TrainerStarted()
                | e.TrainerFailed()
                | e.TrainerStopped()
                | e.StepDone()
                | e.VersionPublished()
                | e.Accumulated()
                | e.CheckpointSaved()
                | e.CheckpointFailed()
            ):
                return self._trainer_event(event, now)
            case e.PlanChosen() | e.PlanKept() | e.PlanOrdered():
                return self._plan_event(event, now)
            case (
                e.RunStarted()
                | e.NodeLost()
                | e.NodeBack()
                | e.NodeGone()
                | e.TimerFired()
                | e.StopRequested()
            ):
                return self._run_event(event, now)
            case _:
                assert_never(event)

    def _should_restart(self, replica: Replica) -> bool:
        """Whether a process that has ended there is to be started again, if it deserves it."""
        return self._going and self.reconciler.should_restart(replica)

    def _trainer_event(self, event: e.TrainerEvent, now: Seconds) -> Iterable[n.Result]:
        if event.incarnation != self.training.incarnation:
            return ()
        match event:
            case e.TrainerStarted():
                return self._trainer_started(event, now)
            case e.TrainerFailed():
                return self.training.failed(event.reason, now=now)
            case e.TrainerStopped():
                return self.training.gone(now=now, again=self._going)
            case e.StepDone():
                return self._step_done(event, now)
            case e.VersionPublished():
                return self._published(event.published)
            case e.Accumulated() | e.CheckpointSaved() | e.CheckpointFailed():
                return self.training.told(event, now=now)
            case _:
                assert_never(event)

    def _trainer_started(self, event: e.TrainerStarted, now: Seconds) -> Iterator[n.Result]:
        if self.training.state is TrainerState.STARTING:
            yield from self.training.started(event, now=now)
            yield from self._publish(event.published)

    def _published(self, published: e.PublishedVersion) -> Iterator[n.Result]:
        results = self.training.version_published(published)
        yield from results
        if results:
            yield from self._publish(published)

    def _step_done(self, event: e.StepDone, now: Seconds) -> Iterator[n.Result]:
        if self.training.state is not TrainerState.BUSY or event.step <= self.training.step:
            return
        yield from self.training.done(event, now=now)
        yield from map(Save, self.warnings.saw(self.training.last, now=now))
        for group in self.training.trained:
            yield from map(Save, group_records(group, now))
        if published := event.published or self.training.early:
            yield from self._published(published)
        if self._going:
            last, signs = self.training.last, self._observer.signs
            yield from self.controller.stepped(last, self._ready_share, signs, now=now)

    @property
    def _ready_share(self) -> float:
        """The share of the groups begun and not trained that wait for training."""
        ready, played = self.ledger.count(GroupState.READY), self.ledger.count(GroupState.OPEN)
        return ready / max(1, ready + played)

    def _observe(self) -> Observation | None:
        """What a planner may know now; None before a trajectory has finished."""
        workload, measured = self._observer.workload, self._observer.measured
        if workload is None:
            return None
        starved = bool(measured) and measured[-1].starved
        return Observation(
            step=self.training.step,
            plan=self.plan,
            slots=self.controller.slots,
            pins=tuple(self.controller.pins.items()),
            workload=workload,
            measured=measured,
            lengths=self._observer.lengths,
            evidence=self._observer.evidence,
            recalibration=self.controller.recalibration,
            rollout_idle=0.0 if starved else self._ready_share,
            queue=len(self.scheduler) / max(1, self.scheduler.queues.seats),
            steps_left=self.recipe.run.steps - self.training.step,
            predictions=self._observer.predictions,
            sync_s=self._observer.sync_s,
        )

    def _publish(self, published: e.PublishedVersion) -> Iterator[n.Result]:
        yield from self.servers.publish(published)
        yield from self.workers.publish(published)

    def _plan_event(self, event: e.PlanEvent, now: Seconds) -> Iterable[n.Result]:
        match event:
            case e.PlanKept():
                return self.controller.kept(event, now=now)
            case e.PlanChosen() if self._going:
                return self.controller.chosen(event, now=now)
            case e.PlanOrdered() if self._going:
                return self.controller.ordered(event, now=now)
            case e.PlanChosen() | e.PlanOrdered():  # no slot moves any more
                ending = AnswerOrder(event.order, accepted=False, text="the run is ending")
                return [ending] if event.order else []
            case _:
                assert_never(event)

    def _run_event(self, event: e.RunEvent, now: Seconds) -> Iterator[n.Result]:
        match event:
            case e.RunStarted():
                self.run.started_at = now
                step, explained = self.training.step, self._first_explanation
                yield from map(Save, self.evaluations.cut_left(now=now))
                yield from self.controller.begin(explained, step=step, now=now)
                yield from self.training.start(now=now)
            case e.NodeLost() | e.NodeBack() | e.NodeGone():
                yield from self._node_event(event, now)
            case e.TimerFired(name):
                yield from self._timer_fired(name, now)
            case e.StopRequested():
                yield from self._stop_requested(event, now)
            case _:
                assert_never(event)

    def _node_event(
        self, event: e.NodeLost | e.NodeBack | e.NodeGone, now: Seconds
    ) -> Iterator[n.Result]:
        match event:
            case e.NodeLost(node):
                yield from self.servers.lost(node)
                yield from self.workers.lost(node)
            case e.NodeBack(node, alive):
                yield from self.servers.back(node, alive, now=now)
                yield from self.workers.back(node, alive, now=now)
                yield from self.training.back(node, now=now)
            case e.NodeGone(node, reason):
                if node == node_of(self.training.slots[0]):  # where versions are published
                    self.servers.latest = self.workers.latest = None
                yield from self.servers.node_gone(node, reason, now=now)
                yield from self.workers.node_gone(node, reason, now=now)
                yield from self.training.node_gone(node, reason, now=now)
                yield Wake(f"{GONE_TIMER}{node}", replica_set.GONE_S)

    @property
    def plan(self) -> Plan:
        """The newest."""
        return self.controller.plan

    def _timer_fired(self, name: str, now: Seconds) -> Iterable[n.Result]:
        if name.startswith(reconciler.TIMER):
            return self.reconciler.overdue(name, now=now)
        if name == DRAIN_TIMER and self.phase is Phase.DRAINING:
            return self._drain_over(now)
        return self._due(name, now) if self._going else ()

    def _due(self, name: str, now: Seconds) -> Iterable[n.Result]:
        """What a timer calls for in a run that goes on."""
        if name == TIMER:
            return self.training.restart(now=now)
        if name == EVALUATION_TIMER:
            return self._evaluations_stalled(now)
        if name.startswith(replica_set.TIMER):
            return self._rested(name, now)
        if name.startswith(GONE_TIMER):
            return self._node_overdue(name.removeprefix(GONE_TIMER), now)
        if name.startswith(migration.TIMER):
            return self.reconciler.deadline(name, now=now)
        if name == teaching.TIMER and self.rollout.teacher is not None:
            return self.rollout.teacher.again()
        return ()

    def _rested(self, timer: str, now: Seconds) -> Iterator[n.Result]:
        yield from self.servers.rested(timer, self._should_restart, now=now)
        yield from self.workers.rested(timer, self._should_restart, now=now)

    def _node_overdue(self, node: str, now: Seconds) -> Iterator[n.Result]:
        self.servers.node_overdue(node, now=now)
        yield from self.training.node_overdue(node, now=now)

    def _drain_over(self, now: Seconds) -> Iterator[n.Result]:
        """Turns get no more time. A step or a checkpoint does, as long as it may well be done."""
        waited_s = now - self._drains_since
        if self.training.at_work and waited_s < self.training.patience_s:
            yield from self.rollout.abandon(now=now)
            yield Wake(DRAIN_TIMER, DRAIN_S)
            return
        if self.training.at_work:
            self._fail(f"{self.training.work} did not end within {waited_s:.0f} s", RESUME)
        yield from self._stop_all(now)

    def _stop_requested(self, event: e.StopRequested, now: Seconds) -> Iterator[n.Result]:
        if self._going:
            yield from self._wind_down("stopped", event.reason, now)
        if event.at_once and self.phase is Phase.DRAINING:
            yield from self._stop_all(now)

    # -- settling ---------------------------------------------------------------------------------

    def _is_quiet(self, event: e.Event) -> bool:
        """Whether all that this event can have set free is a seat, or a request that wants one.

        A turn, or its tool's return, that ends no trajectory changes no group, server, trainer or
        phase, and adds to the contexts in play: what waited for one of those waits on.
        """
        in_play = isinstance(event, e.TurnGenerated) or (
            isinstance(event, e.EpisodeAdvanced) and not event.done
        )
        return (
            in_play
            and self.run.phase is Phase.RUNNING
            and self._agenda.is_empty
            and self.reconciler.at_rest
        )

    def _settle(self, actions: list[Action], now: Seconds) -> None:
        """Whatever can go on now, goes on."""
        route = self._router.route
        if self._going:
            route(self._settle_slots(now), actions, now)
        route(self._settle_routes(now), actions, now)
        if self._going:
            route(self._go_on(now), actions, now)
        if not self._going:
            route(self._end_on(now), actions, now)

    def _end_on(self, now: Seconds) -> Iterator[n.Result]:
        """A run that is being wound down comes a little nearer to its end."""
        if self.phase is Phase.DRAINING:
            yield from self.training.save(now=now)
            if self._drained:
                self._tell_unsaved()
                yield from self._stop_all(now)
        if self.phase is Phase.STOPPING and self._all_gone:
            self.run.enter(Phase.ENDED)
            self.run.ended_at = now

    def _settle_slots(self, now: Seconds) -> Iterator[n.Result]:
        """What this changes itself is looked at again after the next event."""
        agenda = self._agenda
        changed, agenda.look = agenda.look, False
        yield from self.reconciler.settle(changed=changed, now=now)
        if agenda.mended:
            agenda.mended = False
            yield from self.controller.mended()

    def _settle_routes(self, now: Seconds) -> Iterator[n.Result]:
        agenda = self._agenda
        if agenda.lost:
            lost, agenda.lost = agenda.lost, {}
            yield from self.rollout.requeue(lost, now=now)
        if agenda.reroute:
            agenda.reroute = False
            latest = self.servers.latest.version if self.servers.latest else None
            self.scheduler.refresh(self.servers.routable(), latest=latest, now=now)

    def _go_on(self, now: Seconds) -> Iterator[n.Result]:
        broken, target, run = self._broken, self.recipe.run.steps, self.run
        ready = self.training.state is TrainerState.READY
        was_over = self.scheduler.training_over
        over = self.scheduler.training_over = ready and self.training.step >= target
        if broken and not over:
            yield from self._wind_down("failed", broken, now)
        elif over and (self.servers.all_failed or self.evaluations.is_done(target)):
            yield from self._cut_evaluations(f"no server is left: {self.servers.all_failed}", now)
            yield from self._wind_down("finished", "", now)
        elif over and not was_over:
            yield Wake(EVALUATION_TIMER, STALLED_S)
        elif run.phase is Phase.STARTING and (self._has_rollout or ready):
            run.enter(Phase.RUNNING)
        if run.phase is not Phase.RUNNING:
            return
        yield from self._evaluate(now)
        if over:
            yield from self.rollout.dispatch(now=now)
        else:
            yield from self._train_on(now)

    def _train_on(self, now: Seconds) -> Iterator[n.Result]:
        """Open groups, send requests and begin a step, as far as any of it can be done."""
        if self.training.state is TrainerState.READY:  # only then does age matter
            for group in self.ledger.expire(self.training.step):
                yield Save(group_record(group, now, detail="too old to train on"))
        yield from self.rollout.fill(version=self.training.published_step, now=now)
        yield from self.rollout.dispatch(now=now)
        # Workers that share in a step need the weights it begins with.
        if not (self.training.publishing and self.workers.would_share):
            yield from self.training.claim(now=now, target=self.recipe.run.steps)

    def _evaluate(self, now: Seconds) -> Iterator[n.Result]:
        """Begin evaluations that are due, and trajectories of those that are under way."""
        if self.servers.latest is None:
            return
        latest, target = self.servers.latest.version, self.recipe.run.steps
        yield from map(Save, self.evaluations.begin_due(latest, target=target, now=now))
        if self.evaluations.running:
            yield from self.rollout.evaluate(now=now)

    def _cut_evaluations(self, why: str, now: Seconds) -> Iterator[n.Result]:
        """They do not hold up the end of a run whose training is done."""
        for one in list(self.evaluations.running.values()):
            yield from self.rollout.cut(one, why, now=now)

    def _evaluations_stalled(self, now: Seconds) -> Iterator[n.Result]:
        """The last evaluations may take as long as their turns come back."""
        if not self.scheduler.training_over:
            return
        quiet_s = now - self.evaluations.went_on_at if self.evaluations.running else 0.0
        if quiet_s < STALLED_S:
            yield Wake(EVALUATION_TIMER, STALLED_S - quiet_s)
            return
        yield from self._cut_evaluations(f"no turn of it came back for {quiet_s:.0f} s", now)
        self.evaluations.close()

    @property
    def _has_rollout(self) -> bool:
        """Whether a server takes requests."""
        return self.scheduler.queues.seats > 0

    @property
    def _broken(self) -> str:
        """Why the run cannot go on; empty while it can."""
        if self.training.state is TrainerState.FAILED:
            return f"the trainer failed: {self.training.detail}; mend that, {RESUME}"
        teacher = self.rollout.teacher
        if teacher is not None and teacher.given_up:
            return f"{teacher.given_up}; mend that, {RESUME}"
        if self.rollout.dropped_in_a_row > MAX_DROPPED:
            what = "demonstration" if self.recipe.demonstrations else "environment"
            return f"the {what} breaks every time: {self.rollout.last_failure}"
        all_failed = self.servers.all_failed
        return f"no server is left: {all_failed}; mend one, {RESUME}" if all_failed else ""

    def _wind_down(self, outcome: str, error: str, now: Seconds) -> list[n.Result]:
        self._drains_since = now
        self.run.enter(Phase.DRAINING)
        self.run.outcome, self.run.error = outcome, error
        return [Wake(DRAIN_TIMER, DRAIN_S)]

    def _tell_unsaved(self) -> None:
        """A run whose last checkpoint could not be written has failed, and says so."""
        if self.training.checkpoints.given_up(self.training.step):
            self._fail(self.training.unsaved, "make room there", RESUME)

    def _fail(self, *why: str) -> None:
        """A run that was ending anyway has not ended as it should."""
        said = [self.run.error] if self.run.error else []
        self.run.outcome, self.run.error = "failed", "; ".join([*said, *why])

    @property
    def _drained(self) -> bool:
        generating = any(a.stage is Stage.GENERATING for a in self.rollout.active.values())
        return not (generating or self.training.at_work or self.servers.syncing)

    def _stop_all(self, now: Seconds) -> Iterator[n.Result]:
        self.run.enter(Phase.STOPPING)
        why = f"the run {self.run.outcome}"
        yield from self.rollout.abandon(now=now)
        yield from self.reconciler.end(why, now=now)
        yield from self.servers.stop(why, now=now)
        yield from self.workers.stop(why, now=now)
        yield from self.training.stop(why, now=now)

    @property
    def _all_gone(self) -> bool:
        down = self.training.state in (TrainerState.DOWN, TrainerState.FAILED)
        return down and self.servers.stopped and self.workers.stopped

    # -- telling ----------------------------------------------------------------------------------

    def _waiting(self) -> str:
        """Who waits on whom, for people."""
        phase = self.run.phase
        if phase in (Phase.DRAINING, Phase.STOPPING):
            return f"the run is ending ({self.run.outcome})"
        trainer = self.training.state
        if self.recipe.demonstrations:
            at_work = trainer in (TrainerState.READY, TrainerState.BUSY)
            return "nobody waits" if at_work else "everything waits for the trainer to start"
        if phase is Phase.STARTING:
            return "everyone waits for the first server and the trainer to start"
        return self._who_waits(trainer)

    def _who_waits(self, trainer: TrainerState) -> str:
        """Of a run whose halves are both there."""
        if trainer in (TrainerState.DOWN, TrainerState.STARTING, TrainerState.STOPPING):
            return "rollout goes on up to the staleness bound; the trainer is starting again"
        if not self.scheduler.queues.seats:
            return "training waits for rollout: no server is serving"
        if trainer is TrainerState.BUSY and not self.ledger.may_open and not self.ledger.playing:
            return "rollout waits for training: the staleness bound is reached"
        return self._trainer_waits() if trainer is TrainerState.READY else "nobody waits"

    def _trainer_waits(self) -> str:
        teacher = self.rollout.teacher
        if teacher is not None and teacher.is_silent:
            return "training waits for rollout, and rollout for the teacher, which does not answer"
        if self.scheduler.training_over:
            return "training is done; the run ends when the last version is evaluated"
        if self.ledger.batch_is_full:
            return "training waits for rollout: groups that this step is the last one for"
        return "training waits for rollout: the next batch is not full"

    def check(self) -> None:
        """Invariants that hold between any two events."""
        self.ledger.check()
        self.evaluations.check()
        self.servers.check()
        self.rollout.check()
        self.training.check()
        self.scheduler.check()
        self.workers.check()
        self.reconciler.check()
        routable = [slot for slot, server in self.servers.replicas.items() if server.routable]
        known = list(self.scheduler.queues.by_slot)
        assert self._agenda.reroute or routable == known, "the scheduler is behind"
        claimed = self.ledger.count(GroupState.CLAIMED)
        ready = self.training.state is TrainerState.READY
        assert claimed == 0 or not ready or self.training.streaming
