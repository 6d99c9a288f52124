"""How near a simulated run is to one that really took place.

The trajectories of a finished run are played again in virtual time: the same prompts, generated
lengths, tool returns and tool times, the same recipe and plan, the machine and policy of
production; servers, trainer and weight syncs cost what a profile says. Compared are the seconds
from one optimizer step's end to the next, from the end of the first one on, since before it
everything was starting.

Guarantee: of the recorded run only what the policy and the environment did is used, never a time
but those of tools; the profile must come from elsewhere (``libra bench --calibrate``), and nothing
is fitted here. Limit: what was still being played when the run ended is completed with trajectories
of the same run; failures, restarts and changes of plan are not played again. What the controller
does for a turn is known only as far as the calibration did it too, and one number says how much
sharing cores slows the trainer down, where it depends on the load: on a host of two cores without
GPUs simulated steps are too short by a tenth to nearly a half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean

from libra_cli.bench.config import Progress
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import TrainSample
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.profile import Profile, ProfileError
from libra_cli.core.costs.server import guessed_cost
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.planning.controller import plan_of_record
from libra_cli.core.records import StepRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, ToolOutcome, TrajectoryId
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.plugins.finding import find
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import slots_of_plan
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.config import SimConfig
from libra_cli.sim.recording import Recording
from libra_cli.sim.traces import RecordedEpisode, Turn
from libra_cli.sim.world import World
from tests.research.fidelity.server import RunError

LEAST_STEPS = 3
"""Steps of a run that say anything about the time of a step."""
WANTED_ERROR = 0.08
"""Mean size of the relative error of a run's step time that counts as near enough; chosen."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is used of a finished run: its recipe, and rows of its journal.

    ``finished`` are the trajectories that came to their end; ``first`` is the plan that it began
    with and its slots, where it has kept one.
    """

    name: str
    recipe: Recipe
    steps: tuple[StepRecord, ...]
    turns: tuple[TurnRecord, ...]
    finished: frozenset[TrajectoryId]
    first: tuple[Plan, tuple[Slot, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Paces:
    """Seconds of each step of a run after the first, real or simulated, and of its training."""

    steps_s: tuple[Seconds, ...]
    train_s: tuple[Seconds, ...]
    tokens: int

    @property
    def step_s(self) -> Seconds:
        """Mean seconds of a step."""
        return fmean(self.steps_s)

    @property
    def tokens_per_s(self) -> float:
        """Generated and trained tokens a second."""
        return self.tokens / sum(self.steps_s)


@dataclass(frozen=True, slots=True)
class LiveFidelity:
    """A run beside its simulation. Errors are relative and signed: +0.05 is 5 % too slow."""

    name: str
    recorded: Paces
    simulated: Paces

    @property
    def step_error(self) -> float:
        """The relative error of the mean seconds of a step."""
        return self.simulated.step_s / self.recorded.step_s - 1

    @property
    def each_error(self) -> float:
        """The mean size of the relative errors of single steps."""
        pairs = zip(self.simulated.steps_s, self.recorded.steps_s, strict=False)
        return fmean(abs(mine / real - 1) for mine, real in pairs)

    @property
    def train_error(self) -> float:
        """The relative error of the mean seconds of training in a step."""
        return fmean(self.simulated.train_s) / fmean(self.recorded.train_s) - 1


def compare_runs(
    run_dirs: Sequence[Path], profile: Profile, *, progress: Progress
) -> list[LiveFidelity]:
    """Each finished run beside its simulation with a profile that was measured elsewhere.

    Raises:
        LibraError: a run that cannot be read, or that the profile says nothing of.
    """
    found = []
    for run_dir in run_dirs:
        progress(f"playing {run_dir.name} again")
        found.append(compared(read_run_dir(run_dir), profile))
    return found


def read_run_dir(run_dir: Path) -> Recorded:
    """What a replay needs of a run directory.

    Raises:
        StateError: there is no run, or not all of it.
    """
    with Reader(run_dir) as reader:
        steps = reader.rows(StepRecord)
        turns = reader.rows(TurnRecord)
        ended = reader.rows(TrajectoryRecord, "state = 'finished'")
        recipe = recipe_of(run_dir)
        plans = [plan_of_record(row) for row in reader.plans()[:1]]
        first = [(plan, slots_of_plan(reader, recipe, plan)) for plan in plans]
    finished = frozenset(TrajectoryId(row.group_id, row.member, row.attempt) for row in ended)
    rows = tuple(steps), tuple(turns), finished
    return Recorded(run_dir.name, recipe, *rows, first[0] if first else None)


def compared(recorded: Recorded, profile: Profile) -> LiveFidelity:
    """Play a recorded run again and compare.

    Raises:
        RunError: the run has too few steps, or no trajectory that ended.
        ProfileError: the profile has no server of a shape that the run has.
    """
    if len(recorded.steps) < LEAST_STEPS:
        raise RunError(
            f"{recorded.name}: {len(recorded.steps)} steps say too little of a step's time; "
            f"at least {LEAST_STEPS} are needed"
        )
    simulated = replayed(recorded, profile)
    return LiveFidelity(recorded.name, paces(recorded.steps), paces(simulated.steps))


def paces(steps: Sequence[StepRecord]) -> Paces:
    """The seconds of the steps, from their rows in order."""
    return Paces(
        tuple(after.ended_at - before.ended_at for before, after in pairwise(steps)),
        tuple(step.ended_at - step.started_at for step in steps[1:]),
        sum(step.generated_tokens for step in steps[1:]),
    )


def replayed(recorded: Recorded, profile: Profile) -> Recording:
    """The run in virtual time. Raises as ``compared`` does."""
    groups = _groups(recorded)
    policy = find(POLICIES, recorded.recipe.scheduler.policy)()
    return World(_config(recorded, profile), policy, groups).run()


def _config(recorded: Recorded, profile: Profile) -> SimConfig:
    recipe, contention = recorded.recipe, profile.surroundings
    plan, slots = recorded.first or (initial_plan(recipe), slots_of(recipe))
    missing = {b.tensor_parallel for _, b in plan.servers} - set(profile.servers)
    if missing:
        raise ProfileError(
            f"profile {profile.name} has no server of {min(missing)} GPUs, and {recorded.name} has",
            hint="libra bench --calibrate with that run's recipe",
        )
    beside = profile.scaled(contention.serving_slowdown)
    return SimConfig(
        recipe=recipe,
        plan=plan,
        slots=_numbered(slots),
        cost_of=partial(_cost, profile),
        guess_of=guessed_cost,
        train_s=partial(_train_s, profile, len(plan.train)),
        start_s=lambda bucket: profile.moves.start(bucket.tensor_parallel),
        sync_s=contention.sync_s,
        stall_s=contention.stall_s,
        turn_s=contention.turn_s,
        beside_of=partial(_cost, beside) if contention.serving_slowdown > 1 else None,
        training_slowdown=contention.training_slowdown,
    )


def _numbered(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """The world tells slots apart by their GPUs; those of hosts without any get a number."""
    numbers = count(1_000_000)
    return tuple(slot if slot.gpus else replace(slot, gpus=(next(numbers),)) for slot in slots)


def _cost(profile: Profile, bucket: Bucket) -> ServerLaw:
    return profile.servers[bucket.tensor_parallel]


def _train_s(profile: Profile, ranks: int, samples: tuple[TrainSample, ...], gpus: int) -> Seconds:
    sizes = tuple(
        TrajectorySample(
            prompt=len(sample.trajectory.token_ids) - sample.trajectory.generated,
            generated=max(1, sample.trajectory.generated),
        )
        for sample in samples
    )
    return profile.training.seconds(ranks, Workload(sizes, len(sizes)))


# -- the trajectories of the run -----------------------------------------------------------------


def _groups(recorded: Recorded) -> Iterator[tuple[RecordedEpisode, ...]]:
    """Group after group as they were played; for unfinished members finished ones of others."""
    played = episodes(recorded)
    if not played:
        raise RunError(f"{recorded.name}: no trajectory came to its end")
    size = recorded.recipe.rollout.group_size
    spare = [episode for _, episode in sorted(played.items())]
    for group in count():
        yield tuple(
            played.get((group, member), spare[(group * size + member) % len(spare)])
            for member in range(size)
        )


def episodes(recorded: Recorded) -> dict[tuple[int, int], RecordedEpisode]:
    """By group and member, the last attempt of every trajectory that ended."""
    turns: dict[TrajectoryId, list[TurnRecord]] = defaultdict(list)
    for row in recorded.turns:
        turns[TrajectoryId(row.group_id, row.member, row.attempt)].append(row)
    found: dict[tuple[int, int], RecordedEpisode] = {}
    for who in sorted(recorded.finished):
        rows = sorted(turns[who], key=lambda row: row.turn)
        if rows:
            found[who.group, who.member] = _episode(who, rows)
    return found


def _episode(who: TrajectoryId, rows: Sequence[TurnRecord]) -> RecordedEpisode:
    """What was observed after a turn is what the next prompt has beyond the context so far."""
    ends = [row.prompt_tokens + row.generated_tokens for row in rows]
    observed = [after.prompt_tokens - end for after, end in zip(rows[1:], ends, strict=False)]
    played = tuple(_turn(row, seen) for row, seen in zip(rows, [*observed, 0], strict=True))
    return RecordedEpisode(str(who.group), rows[0].prompt_tokens, played, 0.0)


def _turn(row: TurnRecord, observed: int) -> Turn:
    """Several tool calls of a turn count as one that took as long as all of them."""
    worst = max((call.outcome for call in row.tools), key=_SEVERITY.index, default=None)
    return Turn(
        generated=max(1, row.generated_tokens),
        observation=max(0, observed),
        tool=row.tools[0].tool if row.tools else "",
        outcome=worst,
        tool_s=sum(call.latency_s for call in row.tools),
    )


_SEVERITY = [ToolOutcome.OK, ToolOutcome.ERROR, ToolOutcome.TIMEOUT]
