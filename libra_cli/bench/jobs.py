"""One simulated run: a workload, who decides, and what came out.

Every contender of a seed plays the same groups in the same order. A job is a whole run, rollout and
training overlapping as in production. Throughput counts the generated tokens of trained
trajectories; what was played and thrown away does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import fmean

from libra_cli.bench.bounds import ServerShape, least_makespan
from libra_cli.bench.clairvoyance import TOLD, OraclePlanner, ScheduledLayouts
from libra_cli.bench.conditions import MAX_LEN, STALENESS
from libra_cli.bench.contenders import Future, contender
from libra_cli.bench.idle_servers import believed_law, placed_beside, shared_profile
from libra_cli.bench.regret_causes import PlannedStep, planned_steps
from libra_cli.bench.results import ResultRow, Timeline
from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import Shapes
from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.expected import guessed_lengths, samples_around
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.baselines import STATIC, first_layout, planner_of
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.planner import DecisionMaker
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.planning.training_table import TrainingTable
from libra_cli.core.rollout.staleness import rule_of
from libra_cli.core.types import Seconds, Tokens, TrajectoryId
from libra_cli.core.workload import BatchOverhead, TrajectoryLimits, TrajectorySample, Workload
from libra_cli.sim.config import SimConfig
from libra_cli.sim.drift import NO_DRIFT, Drift
from libra_cli.sim.priced_scene import priced_scene
from libra_cli.sim.traces import RecordedEpisode, Trace, TraceError
from libra_cli.sim.world import World

STEPS = 5
"""Optimizer steps of a run."""
GROUPS, GROUP_SIZE = 32, 8
MAX_TURNS = 1_000_000
"""A limit of turns that no recorded trajectory reaches."""
TRAINED_ON = 1 / 3
"""Share of the GPUs on which a trainer must hold the longest trajectory, so that up to two thirds
may serve whatever is drawn. Chosen.
"""
STORY_SEED = 0
SWITCH_S: Seconds = 3.6 + 4.4 + 10.8
"""Seconds from play to training and back where all GPUs do both in turn and no process ends: a
snapshot, the trainer's state restored, servers woken, as published for Libra (arXiv 2606.03077).
"""


@dataclass(frozen=True, slots=True)
class Job:
    """The input of one simulated run. ``believed`` are the costs the policy and the planner reckon
    with.

    ``layout`` stays as it is for the whole run; ``start`` is what a planner that moves begins with,
    its own first plan without. ``script`` are layouts for equal parts of the run, one after the
    other, for the clairvoyant planner; its base group is the smallest that any of them trains with.
    Where ``regroups`` is given, the run begins as libra's, and the script's trainer becomes one
    group or not.
    ``bound`` is training.max_staleness, ``staleness`` its rule (empty: the recipe's default) and
    ``stream`` training.stream, as in a recipe; ``decay`` is that of a token's worth, in nats a
    version. ``most_tokens`` cuts trajectories earlier than memory. ``shapes`` are rollout.shapes.
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
    start: Layout | None = None
    script: tuple[Layout, ...] = ()
    regroups: bool | None = None
    drift: Drift = NO_DRIFT
    steps: int = STEPS
    groups_per_step: int = GROUPS
    group_size: int = GROUP_SIZE
    oversample: int = 0
    bound: int = STALENESS
    staleness: str | Mapping[str, object] = field(default_factory=dict)
    stream: bool = False
    decay: float = 0.0
    most_tokens: Tokens = MAX_LEN
    shapes: Shapes = "alike"

    @property
    def settings(self) -> PlannerSettings:
        """The limits of what a planner may propose."""
        return PlannerSettings(shapes=self.shapes)

    @property
    def max_len(self) -> Tokens:
        """Tokens at which trajectories are cut: model.max_len of the recipe."""
        return min(self.most_tokens, longest_of(self.profile, self.gpus))

    @property
    def workload(self) -> Workload:
        """The work expected before the run: other draws from the
        same tasks, as they are at first.
        """
        first = replace(self.drift, factors=self.drift.factors[:1], task=None)
        groups = first.groups(self.trace, f"plan/{self.seed}", size=self.members, number=1)
        return self.work_of(islice(groups, self.groups_per_step))

    def work_of(self, groups: Iterable[Sequence[RecordedEpisode]]) -> Workload:
        """Return these groups as the work of a step that a planner plans for."""
        longest = self.max_len
        return self._work(tuple(each.sample(longest) for group in groups for each in group))

    @property
    def lengths(self) -> dict[str, float]:
        """The means of the work that the first plan knows, as ``planner.lengths`` of a recipe."""
        samples = self.workload.samples
        turns = max(1, round(fmean(one.turns for one in samples)))
        return {
            "generated": max(1.0, fmean(one.generated for one in samples)),
            "prompt": round(fmean(one.prompt for one in samples)),
            "observed": round(fmean(one.observed for one in samples)),
            "turns": turns,
            "tool_s": fmean(one.tool_s for one in samples) / max(1, turns - 1),
        }

    @property
    def guessed(self) -> Workload:
        """The work expected by a recipe without lengths: a guess from its limits, which allow the
        most turns of the trace, and the most tokens of one.
        """
        turns = [episode.turns for episode in self.trace.episodes]
        most = max(turn.generated for each in turns for turn in each)
        limits = TrajectoryLimits(self.max_len, max(map(len, turns)), most)
        return self._work(samples_around(guessed_lengths(limits)))

    def _work(self, samples: tuple[TrajectorySample, ...]) -> Workload:
        rule = rule_of(TrainingSpec.model_validate(_batches(self)))
        return Workload(
            samples,
            self.groups_per_step * self.group_size,
            overlap=self.overlap,
            late=rule.late,
            group_size=self.group_size,
            holders=rule.holders(self.group_size),
            ready=rule.ready,
            extras=BatchOverhead(surplus=self.oversample / self.group_size),
            limits=self.limits,
        )

    @property
    def limits(self) -> TrajectoryLimits:
        """A run's: recorded trajectories end by themselves, or where the context is full."""
        return TrajectoryLimits(self.max_len, MAX_TURNS, self.max_len - 1)

    def coming(self, step: int) -> Workload:
        """The work that may be in flight after this step, of the recorded future."""
        first, last = (round(at * self.groups_per_step) for at in (step, step + self.overlap))
        return self.work_of(islice(self.groups(), first, last))

    @property
    def members(self) -> int:
        """Trajectories that a group begins with."""
        return self.group_size + self.oversample

    @property
    def overlap(self) -> float:
        """Steps whose trajectories may be in flight together."""
        return 1.0 + self.bound

    def groups(self) -> Iterator[tuple[RecordedEpisode, ...]]:
        """The groups of the run, changed as the drift says."""
        number = self.steps * self.groups_per_step
        name = f"run/{self.seed}"
        groups = self.drift.groups(self.trace, name, size=self.members, number=number)
        if self.drift.kind != "contexts":
            return groups
        # A grown prompt that no run would take is one that a user would have left out.
        return (tuple(one.cut(self.max_len) for one in group) for group in groups)


def _batches(job: Job) -> dict[str, object]:
    return {"max_staleness": job.bound, "staleness": job.staleness}


def longest_of(profile: Profile, gpus: int) -> Tokens:
    """Return at how many tokens trajectories are cut on ``gpus`` GPUs: ``MAX_LEN``, or what a
    trainer on ``TRAINED_ON`` of them has the memory for; where it has none at all, the smallest
    that has.
    """
    least = max(1, round(TRAINED_ON * gpus))
    fitting = map(profile.training.longest_context, range(least, gpus + 1))
    return min(MAX_LEN, next(filter(None, fitting), MAX_LEN))


def playable(trace: Trace, max_len: Tokens) -> tuple[Trace, tuple[str, ...]]:
    """The trace without what no run could play, and what there is to say about it.

    Raises:
        TraceError: nothing is left.
    """
    fits = tuple(episode for episode in trace.episodes if episode.prompt < max_len)
    cut = sum(episode.context > max_len for episode in fits)
    left_out = len(trace.episodes) - len(fits)
    notes = []
    if left_out:
        notes.append(f"{trace.name}: {left_out} prompts of {max_len:,} tokens or more left out")
    if cut:
        notes.append(f"{trace.name}: {cut} of {len(fits)} trajectories are cut at {max_len:,}")
    if not fits:
        raise TraceError(
            f"{trace.name}: every prompt has {max_len:,} tokens or more, and no run takes that",
            hint="give a trace of shorter trajectories, or more --gpus",
        )
    return replace(trace, episodes=fits), tuple(notes)


# -- one run -------------------------------------------------------------------------------------


def run_job(job: Job) -> tuple[ResultRow, Timeline | None]:
    """Simulate one run; return its row, and what the report draws of one seed."""
    world = world_of(job)
    world.run()
    return _row(job, world), _story(job, world) if job.seed == STORY_SEED else None


def planned_run(job: Job) -> tuple[ResultRow, Timeline | None, tuple[PlannedStep, ...]]:
    """The same, with the plan and the moves of each step."""
    world = world_of(job)
    world.run()
    steps = planned_steps(world.recording, job.gpus)
    return _row(job, world), _story(job, world) if job.seed == STORY_SEED else None, steps


def static_run(job: Job) -> tuple[ResultRow, tuple[Seconds, ...]]:
    """Simulate one run; return its row, and the time at which each step ended."""
    world = world_of(job)
    world.run()
    return _row(job, world), tuple(step.ended_at for step in world.recording.steps)


def world_of(job: Job) -> World:
    """Return the world of a run, before it begins."""
    workload = job.workload
    layout = job.layout or job.start or first_layout_of(job, workload)
    moves = job.layout is None and job.planner not in STATIC
    trainers = TrainingTable(job.believed.training, workload, job.gpus)
    space = GpuPlacement.around(layout, trainers, max_len=job.max_len, moves=moves)
    if job.script and job.regroups is None:
        space = replace(space, base_gpus=min(each.training_gpus for each in job.script))
    future = Future()
    policy = contender(job.policy, future, job.trace, job.seed)
    planner = _planner(job, space) if moves else None
    world = World(_scene(job, layout, space), policy, job.groups(), planner=planner)
    future.episode = world.episode
    return world


def first_layout_of(job: Job, workload: Workload) -> Layout:
    """The layout that the job's planner begins with, knowing this workload."""
    name = "libra" if job.planner == TOLD else job.planner
    return first_layout(name, job.believed, workload, job.gpus, job.settings)


def _planner(job: Job, space: GpuPlacement) -> DecisionMaker:
    if job.script:
        search = Search(job.believed, job.workload, job.gpus, job.settings)
        if job.regroups is not None:
            space = replace(space, base_gpus=job.script[0].training_gpus)
        return ScheduledLayouts(
            job.script, job.steps, space, search, job.believed, regroups=bool(job.regroups)
        )
    name = "libra" if job.planner == TOLD else job.planner
    planner = planner_of(name, job.believed, space, job.settings)
    return OraclePlanner(planner, job.coming) if job.planner == TOLD else planner


def _scene(job: Job, layout: Layout, space: GpuPlacement) -> SimConfig:
    plan, slots = space.place(layout)
    nodes: list[dict[str, object]] = [{"host": "simulated"}]
    if layout.idle:
        plan, slots, nodes = placed_beside(layout, plan, slots)
    bound = 0 if layout.colocated else job.bound
    recipe = Recipe.model_validate(
        {
            "run": {"steps": job.steps},
            "nodes": nodes,
            "model": {"path": "/simulated", "max_len": job.max_len},
            "rollout": {
                "group_size": job.group_size,
                "oversample": job.oversample,
                "dynamic_sampling": job.drift.filters,
                "max_turns": job.limits.max_turns,
                "max_turn_tokens": job.limits.max_turn_tokens,
            },
            "training": {
                "groups_per_step": job.groups_per_step,
                "max_staleness": bound,
                "staleness": job.staleness,
                "stream": job.stream,
                "micro_batch_tokens": job.max_len,
                "checkpoint_every": 1_000_000,
            },
            "planner": _planner_spec(job),
        }
    )
    scene = priced_scene(
        shared_profile(job.profile, layout),
        guess_of=partial(believed_law, job.believed, layout),
        decay=job.decay,
        switch_s=SWITCH_S if layout.colocated else 0.0,
    )
    return scene(recipe=recipe, plan=plan, slots=slots)


def _planner_spec(job: Job) -> dict[str, object]:
    """libra looks as often as in a live run; a baseline is asked after every step."""
    if job.layout is not None or job.planner in STATIC:
        return {"kind": "fixed"}
    if job.planner == "libra" and job.start is None:
        return {"lengths": job.lengths}
    return {} if job.planner in ("libra", TOLD) else {"plan_interval": 1}


def _row(job: Job, world: World) -> ResultRow:
    tape = world.recording
    took = sorted((t.ended_at or 0.0) - t.started_at for t in tape.trajectories)
    engines = [engine for _, engine in world.servers.retired]
    served = max(world.served_gpu_s(), 1e-9)
    moved = sum(bool(turn.moved_from) for turn in tape.turns)
    last_s = tape.steps[-1].ended_at  # servers are let end their turns after it
    return ResultRow(
        policy=job.policy,
        planner=job.planner,
        trace=job.trace.name,
        seed=job.seed,
        variant=job.variant,
        throughput_tok_s=sum(step.generated_tokens for step in tape.steps) / last_s,
        steady_tok_s=_steady(job, world),
        makespan_s=last_s,
        p50_s=took[len(took) // 2],
        p99_s=took[int(0.99 * (len(took) - 1))],
        idle_rollout=1.0 - world.busy_gpu_s() / served,
        idle_train=tape.idle_train,
        moves=_migrations(world) if job.layout is None else moved,
        reprefilled_tokens=sum(engine.reprefilled_tokens for engine in engines),
        bound_s=_bound_s(job, world),
    )


def _bound_s(job: Job, world: World) -> Seconds | None:
    """The least makespan of what was trained, under a plan that stays and a rule that trains whole
    groups, all whose members are known before."""
    training = TrainingSpec.model_validate(_batches(job))
    if job.layout is None or rule_of(training).least is not None or job.oversample:
        return None
    if len(job.layout.buckets) != 1:
        return None  # the bound is of equal servers
    (bucket,) = job.layout.buckets
    cost = job.profile.servers[bucket.tensor_parallel]
    shape = ServerShape(cost, bucket.servers, bucket.max_num_seqs)
    trained = [
        [world.episode(TrajectoryId(group, member)) for member in range(job.group_size)]
        for group in sorted(world.recording.groups)
    ]
    steps = [end - start for start, end in world.recording.trained]
    return least_makespan(shape, trained, steps, batch=job.groups_per_step, max_len=job.max_len)


def _steady(job: Job, world: World) -> float:
    """Generated tokens a second from the step on by which the pipeline has filled."""
    steps = world.recording.steps
    first = max(1, min(round(job.overlap), len(steps) // 2))
    seconds = steps[-1].ended_at - steps[first - 1].ended_at
    return sum(step.generated_tokens for step in steps[first:]) / seconds if seconds else 0.0


def _migrations(world: World) -> int:
    """Return how many servers the plans started and stopped."""
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
