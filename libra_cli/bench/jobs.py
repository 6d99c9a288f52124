"""One simulated run: a workload, who decides, and what came out.

Every contender of a seed plays the same groups in the same order. A job is a whole run, rollout and
training overlapping as in production. Throughput counts the generated tokens of trained
trajectories; what was played and thrown away does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random

from libra_cli.bench.ablations import ABLATIONS
from libra_cli.bench.oracles import Future, oracle_policy
from libra_cli.bench.results import ResultRow, Timeline
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.costs.profile import Profile, TrainingShape
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.costs.workload import TrajectorySample, Window, Workload
from libra_cli.core.planning.observation import Observation, Replanner, moves_between
from libra_cli.core.planning.recalibration import MeasuredStep, crowd
from libra_cli.core.planning.search import Layout, PlannerSettings
from libra_cli.core.planning.sim_replanner import replanner
from libra_cli.core.records import StepRecord, TrajectoryRecord
from libra_cli.core.rollout.groups import GroupState
from libra_cli.core.types import Bucket, Seconds, TrajectoryId
from libra_cli.sim.layouts import TRAINER, plan_of
from libra_cli.sim.traces import RecordedEpisode, Trace, TraceError
from libra_cli.sim.world import SimConfig, World

STEPS = 5
"""Optimizer steps of a run."""
GROUPS, GROUP_SIZE, STALENESS = 32, 8, 4
MAX_LEN = 131_072
"""Longer trajectories are cut there, as a run would."""
STORY_SEED = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One simulated run. ``believed`` are the costs the policy and the planner reckon with."""

    trace: Trace
    profile: Profile
    believed: Profile
    gpus: int
    policy: str
    planner: str
    seed: int
    variant: str = ""
    layout: Layout | None = None
    settings: PlannerSettings | None = None
    drift: tuple[float, ...] = ()
    steps: int = STEPS

    @property
    def workload(self) -> Workload:
        """What is known before the run: other draws from the same tasks, as they are at first."""
        first = self.drift[0] if self.drift else 1.0
        groups = self.trace.groups(Random(f"plan/{self.seed}"), GROUP_SIZE)
        episodes = [episode for _ in range(GROUPS) for episode in next(groups)]
        samples = tuple(sample_of(episode.stretched(first)) for episode in episodes)
        return Workload(samples, GROUPS * GROUP_SIZE, 1.0 + STALENESS)

    def groups(self) -> Iterator[tuple[RecordedEpisode, ...]]:
        """The groups of the run, stretched as the drift says."""
        drawn = self.trace.groups(Random(f"run/{self.seed}"), GROUP_SIZE)
        for number, group in zip(count(), drawn, strict=False):
            factor = _between(self.drift, number / (self.steps * GROUPS)) if self.drift else 1.0
            yield tuple(episode.stretched(factor) for episode in group)


def _between(factors: Sequence[float], place: float) -> float:
    """Linear between evenly spaced factors; ``place`` runs from 0 to 1."""
    at = min(max(place, 0.0), 1.0) * (len(factors) - 1)
    low = min(int(at), len(factors) - 2)
    return factors[low] + (at - low) * (factors[low + 1] - factors[low])


def playable(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """The trace without what no run could play, and what there is to say about it.

    Raises:
        TraceError: nothing is left.
    """
    fits = tuple(episode for episode in trace.episodes if episode.prompt < MAX_LEN)
    cut = sum(episode.context > MAX_LEN for episode in fits)
    left_out = len(trace.episodes) - len(fits)
    notes = []
    if left_out:
        notes.append(f"{trace.name}: {left_out} prompts of {MAX_LEN:,} tokens or more left out")
    if cut:
        notes.append(f"{trace.name}: {cut} of {len(fits)} trajectories are cut at {MAX_LEN:,}")
    if not fits:
        raise TraceError(
            f"{trace.name}: every prompt has {MAX_LEN:,} tokens or more, and no server takes that",
            hint="give a trace of shorter trajectories",
        )
    return replace(trace, episodes=fits), tuple(notes)


def sample_of(episode: RecordedEpisode) -> TrajectorySample:
    """A trajectory as the planner counts it, cut at ``MAX_LEN``."""
    prompt = min(episode.prompt, MAX_LEN - 1)
    generated = min(episode.generated, MAX_LEN - prompt)
    return TrajectorySample(
        prompt=prompt,
        generated=generated,
        observed=max(0, min(episode.context, MAX_LEN) - prompt - generated),
        turns=len(episode.turns),
        tool_s=sum(turn.tool_s for turn in episode.turns),
    )


# -- one run -------------------------------------------------------------------------------------


class PlannerAdapter:
    """Asks a planner after every step, with what a live run could have measured."""

    def __init__(self, job: Job, planner: Replanner, layout: Layout) -> None:
        self._job = job
        self._planner = planner
        self.layout = layout
        self.moves = 0
        self._window = Window(2 * GROUPS * GROUP_SIZE)
        self._taken = 0
        self._ended_at = 0.0

    def __call__(self, world: World, record: StepRecord) -> e.PlanChosen | None:
        """A new plan, if the planner wants one."""
        ended = world.tape.trajectories[self._taken :]
        for row in ended:
            who = TrajectoryId(row.group_id, row.member, row.attempt)
            self._window.add(sample_of(world.episode(who)))
        self._taken += len(ended)
        seen = self._window.workload(GROUPS * GROUP_SIZE, 1.0 + STALENESS)
        measured = self._measured(world, record, ended)
        self._ended_at = record.ended_at
        if seen is None:
            return None
        decision = self._planner.consider(self._observation(world, record.step, seen, measured))
        if decision.layout is None:
            return None
        moves = moves_between(self.layout, decision.layout)
        self.moves += moves.number
        self.layout = decision.layout
        before = [slot for slot in world.plan_slots() if slot.id != TRAINER]
        plan, slots = plan_of(self.layout, self._job.gpus, max_len=MAX_LEN, before=before)
        return e.PlanChosen(replace(plan, reasons=decision.reasons), slots)

    def _measured(
        self, world: World, record: StepRecord, ended: Sequence[TrajectoryRecord]
    ) -> MeasuredStep:
        began, now = self._ended_at, record.ended_at
        spans = [(row.started_at, row.ended_at or now) for row in ended]
        flights = world.machine.rollout.flights.values()
        spans += [(flight.trajectory.started_at, now) for flight in flights]
        in_play_s, beside = crowd(spans, began, now)
        return MeasuredStep(
            step_s=max(now - began, 1e-9),
            train_s=record.ended_at - record.started_at,
            waited_s=record.waited_s,
            in_play_s=in_play_s,
            beside=beside,
        )

    def _observation(
        self, world: World, step: int, seen: Workload, measured: MeasuredStep
    ) -> Observation:
        """Rollout is the longer half where training waited. Where it did not, rollout was held back
        by the staleness bound, the more so the more groups lie ready."""
        ledger = world.machine.ledger
        played, ready = ledger.count(GroupState.OPEN), ledger.count(GroupState.READY)
        return Observation(
            step=step,
            layout=self.layout,
            recent=seen,
            measured=measured,
            rollout_idle=0.0 if measured.starved else ready / max(1, played + ready),
            queue=len(world.machine.scheduler) / max(1, world.machine.scheduler.lanes.seats),
            gpus=self._job.gpus,
            steps_left=self._job.steps - step,
        )


def run_job(job: Job) -> tuple[ResultRow, Timeline | None]:
    """Simulate one run."""
    world, pilot = world_of(job)
    world.run()
    return _row(job, world, pilot), _story(job, world) if job.seed == STORY_SEED else None


def world_of(job: Job) -> tuple[World, PlannerAdapter | None]:
    """The world of a run, before it begins, and who may change its plan."""
    planner = (
        None
        if job.layout
        else replanner(job.planner, job.believed, job.gpus, settings=job.settings)
    )
    layout = job.layout or (planner.begin(job.workload) if planner else None)
    assert layout is not None
    future = Future()
    made = ABLATIONS.get(job.policy)
    policy = made() if made else oracle_policy(job.policy, future, job.trace, job.seed)
    pilot = PlannerAdapter(job, planner, layout) if planner else None
    world = World(_scene(job, layout), policy, job.groups(), replan=pilot)
    future.episode = world.episode
    return world, pilot


def _scene(job: Job, layout: Layout) -> SimConfig:
    plan, slots = plan_of(layout, job.gpus, max_len=MAX_LEN)
    staleness = 0 if layout.colocated else STALENESS
    recipe = Recipe.model_validate(
        {
            "run": {"steps": job.steps},
            "nodes": [{"host": "simulated"}],
            "model": {"path": "/simulated", "max_len": MAX_LEN},
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_turns": 1_000_000,
                "max_turn_tokens": MAX_LEN - 1,
            },
            "training": {
                "groups_per_step": GROUPS,
                "max_staleness": staleness,
                "micro_batch_tokens": MAX_LEN,
                "checkpoint_every": 1_000_000,
            },
        }
    )
    moves = job.profile.moves
    switch_s = moves.to_training_s + moves.to_rollout_s if layout.colocated else 0.0
    return SimConfig(
        recipe=recipe,
        plan=plan,
        slots=slots,
        cost_of=partial(_cost, job.profile),
        guess_of=partial(_cost, job.believed),
        train_s=partial(_train_s, job.profile, layout.training, switch_s),
        start_s=lambda bucket: moves.start(bucket.tensor_parallel),
        to_training_s=moves.to_training_s,
    )


def _cost(profile: Profile, bucket: Bucket) -> ServerCost:
    return profile.servers[bucket.tensor_parallel]


def _train_s(
    profile: Profile,
    shape: TrainingShape,
    switch_s: Seconds,
    samples: tuple[a.TrainSample, ...],
    gpus: int,
) -> Seconds:
    """A step on so many GPUs: the core's degrees, as many replicas as there is room for."""
    wide = replace(shape, data_parallel=max(1, gpus // shape.tensor_parallel))
    batch = tuple(_sample(sample) for sample in samples)
    return switch_s + profile.training.seconds(wide, Workload(batch, len(batch)))


def _sample(sample: a.TrainSample) -> TrajectorySample:
    trajectory = sample.trajectory
    other = len(trajectory.token_ids) - trajectory.generated
    return TrajectorySample(prompt=other, generated=max(1, trajectory.generated))


def _row(job: Job, world: World, pilot: PlannerAdapter | None) -> ResultRow:
    tape = world.tape
    took = sorted((t.ended_at or 0.0) - t.started_at for t in tape.trajectories)
    engines = [engine for _, engine in world.retired]
    served = max(world.served_gpu_s(), 1e-9)
    moved = sum(bool(turn.moved_from) for turn in tape.turns)
    return ResultRow(
        policy=job.policy,
        planner=job.planner,
        trace=job.trace.name,
        seed=job.seed,
        variant=job.variant,
        throughput_tok_s=sum(step.generated_tokens for step in tape.steps) / tape.ended_at,
        makespan_s=tape.ended_at,
        p50_s=took[len(took) // 2],
        p99_s=took[int(0.99 * (len(took) - 1))],
        idle_rollout=1.0 - world.busy_gpu_s() / served,
        idle_train=1.0 - sum(end - start for start, end in tape.trained) / tape.ended_at,
        moves=pilot.moves if pilot else moved,
        reprefilled_tokens=sum(engine.reprefilled_tokens for engine in engines),
    )


def _story(job: Job, world: World) -> Timeline:
    tape = world.tape
    return Timeline(
        policy=job.policy,
        planner=job.planner,
        trace=job.trace.name,
        seed=job.seed,
        spans=tuple(world.spans()),
        lengths=tuple(row.generated_tokens for row in tape.trajectories),
        calibration=_calibration(world),
        variant=job.variant,
    )


def _calibration(world: World) -> tuple[tuple[float, float, int], ...]:
    """How often what was left stayed below the quantiles that were promised for it."""
    totals = {(t.group_id, t.member): t.generated_tokens for t in world.tape.trajectories}
    done: dict[tuple[int, int], int] = {}
    below = [0, 0, 0]
    number = 0
    for turn in world.tape.turns:
        who = (turn.group_id, turn.member)
        left = totals.get(who, 0) - done.get(who, 0)
        done[who] = done.get(who, 0) + turn.generated_tokens
        if who in totals and turn.expected_p90 > 0 and turn.turn > 0:
            promised = (turn.expected_p10, turn.expected_p50, turn.expected_p90)
            below = [b + (left <= bound) for b, bound in zip(below, promised, strict=True)]
            number += 1
    shares = (0.1, 0.5, 0.9)
    return tuple((s, b / number, number) for s, b in zip(shares, below, strict=True) if number)
