"""One simulated run: a workload, who decides, and what came out.

Every contender of a seed plays the same groups in the same order. A job is a whole run, rollout and
training overlapping as in production. Throughput counts the generated tokens of trained
trajectories; what was played and thrown away does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random

from libra_cli.bench.bounds import ServerShape, least_makespan
from libra_cli.bench.contenders import Future, contender
from libra_cli.bench.results import ResultRow, Timeline
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core.costs.profile import Profile, TrainingShape
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.costs.workload import TrajectorySample, Workload
from libra_cli.core.planning.baselines import STATIC, first_layout, planner_of
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.search import Layout, PlannerSettings
from libra_cli.core.planning.training_shapes import TrainingTree
from libra_cli.core.types import Bucket, Seconds, TrajectoryId
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
    """One simulated run. ``believed`` are the costs the policy and the planner reckon with;
    ``bound`` is training.max_staleness and ``staleness`` its rule, as in a recipe.
    """

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
    bound: int = STALENESS
    staleness: str | Mapping[str, object] = "hold"

    @property
    def workload(self) -> Workload:
        """What is known before the run: other draws from the same tasks, as they are at first."""
        first = self.drift[0] if self.drift else 1.0
        groups = self.trace.groups(Random(f"plan/{self.seed}"), GROUP_SIZE)
        episodes = [episode for _ in range(GROUPS) for episode in next(groups)]
        samples = tuple(sample_of(episode.stretched(first)) for episode in episodes)
        return Workload(samples, GROUPS * GROUP_SIZE, 1.0 + self.bound)

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


def run_job(job: Job) -> tuple[ResultRow, Timeline | None]:
    """Simulate one run."""
    world = world_of(job)
    world.run()
    return _row(job, world), _story(job, world) if job.seed == STORY_SEED else None


def world_of(job: Job) -> World:
    """The world of a run, before it begins."""
    settings = job.settings or PlannerSettings()
    workload = job.workload
    layout = job.layout or first_layout(job.planner, job.believed, workload, job.gpus, settings)
    moves = job.layout is None and job.planner not in STATIC
    tree = TrainingTree(job.believed.training, workload, job.gpus)
    space = GpuPlacement.around(
        layout, job.gpus, max_len=MAX_LEN, least=tree.least() or job.gpus, moves=moves
    )
    future = Future()
    policy = contender(job.policy, future, job.trace, job.seed)
    planner = planner_of(job.planner, job.believed, space, settings) if moves else None
    world = World(_scene(job, layout, space), policy, job.groups(), planner=planner)
    future.episode = world.episode
    return world


def _scene(job: Job, layout: Layout, space: GpuPlacement) -> SimConfig:
    plan, slots = space.place(layout)
    bound = 0 if layout.colocated else job.bound
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
                "max_staleness": bound,
                "staleness": job.staleness,
                "micro_batch_tokens": MAX_LEN,
                "checkpoint_every": 1_000_000,
            },
            "planner": _planner_spec(job),
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
        resize_s=moves.resize_s,
    )


def _planner_spec(job: Job) -> dict[str, object]:
    """libra looks as often as in a live run; a baseline is asked after every step."""
    if job.layout is not None or job.planner in STATIC:
        return {"kind": "fixed"}
    return {} if job.planner == "libra" else {"plan_interval": 1}


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


def _row(job: Job, world: World) -> ResultRow:
    tape = world.recording
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
        moves=_migrations(world) if job.layout is None else moved,
        reprefilled_tokens=sum(engine.reprefilled_tokens for engine in engines),
        bound_s=None if job.layout is None else _bound_s(job, job.layout, world),
    )


def _bound_s(job: Job, layout: Layout, world: World) -> Seconds:
    """The least makespan of what was trained."""
    shapes = [
        ServerShape(job.profile.servers[b.tensor_parallel], b.servers, b.max_num_seqs)
        for b in layout.buckets
    ]
    trained = [
        [world.episode(TrajectoryId(group, member)) for member in range(GROUP_SIZE)]
        for group in sorted(world.recording.groups)
    ]
    steps = [end - start for start, end in world.recording.trained]
    return least_makespan(shapes, trained, steps, batch=GROUPS, max_len=MAX_LEN)


def _migrations(world: World) -> int:
    """Servers that the plans started and stopped."""
    moves = world.recording.moves.values()
    return sum("rollout" in (move.from_role, move.to_role) for move in moves)


def _story(job: Job, world: World) -> Timeline:
    tape = world.recording
    return Timeline(
        policy=job.policy,
        planner=job.planner,
        trace=job.trace.name,
        seed=job.seed,
        spans=tuple(world.spans()),
        lengths=tuple(row.generated_tokens for row in tape.trajectories),
        variant=job.variant,
    )
