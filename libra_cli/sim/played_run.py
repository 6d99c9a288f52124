"""A run that took place, as a simulation plays it again: its trajectories, its plans, its pace.

    finished         played again as it was: prompt, generated and returned tokens, tools, reward
    not finished     what there was of it, then the rest of a finished trajectory that was longer: a
                     trajectory that the run's end, a rule or a failure cut was at least so long
                     (Kaplan-Meier's estimate, drawn); where none was longer, it ends there
    not in the run   groups that a simulation begins after the run's last: groups of its last steps

A seed draws the run again with other luck: each group is one of those begun in the steps
around it, so that what drifts over the run stays where it was.

Limit: several tool calls of a turn count as one that took as long as all of them; failures
are not played again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from random import Random

from libra_cli.config.recipe import Recipe
from libra_cli.core.records import StepRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.types import (
    Plan,
    Seconds,
    Slot,
    Tokens,
    ToolOutcome,
    TrajectoryId,
)
from libra_cli.sim.traces import RecordedEpisode, Turn

NEAR_STEPS = 2
"""Steps before and after its own from which a resampled group is drawn. Chosen."""
_SEVERITY = [ToolOutcome.OK, ToolOutcome.ERROR, ToolOutcome.TIMEOUT]


def chosen(steps: Sequence[StepRecord], every: int) -> Sequence[StepRecord]:
    """Every ``every``-th of the steps of a run, evenly over all of it."""
    return steps[every // 2 :: every]


@dataclass(frozen=True, slots=True)
class AdoptedPlan:
    """A plan of a run, the slots that it knew, and after how many steps it was adopted."""

    after_step: int
    plan: Plan
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """What is used of a run: its recipe, and rows of its journal.

    ``steps`` are in order and without gaps; ``plans`` begin with the one that was in force before
    the first of them. ``began_anew`` are the times (seconds since the epoch) at which it was
    resumed: steps around them say nothing of its pace. Trajectories and turns are those of every
    ``every``-th step: a simulated step then stands for as many real ones.
    """

    name: str
    recipe: Recipe
    steps: tuple[StepRecord, ...]
    trajectories: tuple[TrajectoryRecord, ...]
    turns: tuple[TurnRecord, ...]
    plans: tuple[AdoptedPlan, ...]
    began_anew: tuple[float, ...] = ()
    every: int = 1

    @property
    def played_steps(self) -> int:
        """The number of steps whose groups are here."""
        return len(chosen(self.steps, self.every))


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of each step after the first, real or simulated, and of its training; the tokens that
    they trained. A step that the run was interrupted in is left out."""

    steps_s: tuple[Seconds, ...]
    train_s: tuple[Seconds, ...]
    waited_s: Seconds
    tokens: Tokens

    @classmethod
    def of(
        cls, steps: Sequence[StepRecord], interrupted: Sequence[float] = (), every: int = 1
    ) -> Pace:
        """The pace of these steps, which are in order; of the ``chosen`` ones of them alone."""
        counted = {step.step for step in chosen(steps, every)[1:]}
        pairs = [
            (before, after)
            for before, after in pairwise(steps)
            if after.step in counted
            and not any(before.ended_at <= at < after.ended_at for at in interrupted)
        ]
        return cls(
            tuple(after.ended_at - before.ended_at for before, after in pairs),
            tuple(after.train_s for _, after in pairs),
            sum(after.waited_s for _, after in pairs),
            sum(after.generated_tokens for _, after in pairs),
        )

    @property
    def total_s(self) -> Seconds:
        """Seconds of all of these steps."""
        return sum(self.steps_s)

    @property
    def step_s(self) -> Seconds:
        """Mean seconds of a step."""
        return self.total_s / len(self.steps_s)

    @property
    def train_mean_s(self) -> Seconds:
        """Mean seconds of a step in the trainer."""
        return sum(self.train_s) / len(self.train_s)

    @property
    def tokens_per_s(self) -> float:
        """Generated and trained tokens a second."""
        return self.tokens / self.total_s

    @property
    def idle_training(self) -> float:
        """The share of these seconds that the trainer waited."""
        return self.waited_s / self.total_s


def turn_seconds(turns: Sequence[TurnRecord]) -> Seconds:
    """Mean seconds of a turn on its server; of none 0."""
    return sum(turn.ended_at - turn.started_at for turn in turns) / max(1, len(turns))


@dataclass(frozen=True, slots=True)
class Censored:
    """How many trajectories had begun and not finished, and how many of them were so long that no
    finished one was longer."""

    number: int
    without_longer: int


class PlayedGroups:
    """The groups of a run, from its first on and as many as are asked for."""

    def __init__(self, run: PlayedRun) -> None:
        recipe = run.recipe
        self._size = recipe.group_size + recipe.rollout.oversample
        self._near = max(1, NEAR_STEPS * recipe.training.groups_per_step // run.every)
        self._max_len = recipe.model.max_len
        begun = _episodes(run)
        whole = {who: one for who, (one, ended) in begun.items() if ended}
        #: Finished trajectories, the shortest first.
        self._whole = sorted(whole.values(), key=lambda one: one.generated)
        self.finished = len(whole)
        self.groups = self._filled(begun, whole)

    def censored(self, run: PlayedRun) -> Censored:
        """The trajectories of the run that had not finished."""
        cut = [one for one, ended in _episodes(run).values() if not ended]
        longest = self._whole[-1].generated if self._whole else 0
        return Censored(len(cut), sum(one.generated >= longest for one in cut))

    def played(self, seed: int = 0) -> Iterator[tuple[RecordedEpisode, ...]]:
        """Groups for ever: of seed 0 in the run's order, of others resampled near their place."""
        random, last = Random(seed), len(self.groups) - 1
        for place in count():
            if place > last:
                place = random.randint(max(0, last - self._near), last)
            elif seed:
                ends = max(0, place - self._near), min(last, place + self._near)
                place = random.randint(*ends)
            yield self.groups[place]

    def _filled(
        self,
        begun: dict[tuple[int, int], tuple[RecordedEpisode, bool]],
        whole: dict[tuple[int, int], RecordedEpisode],
    ) -> list[tuple[RecordedEpisode, ...]]:
        """Every group that has begun, whose missing members are drawn and whose cut ones go on."""
        numbers = sorted({group for group, _ in begun})
        return (
            [
                tuple(self._member(group, member, begun, whole) for member in range(self._size))
                for group in numbers
            ]
            if self._whole
            else []
        )

    def _member(
        self,
        group: int,
        member: int,
        begun: dict[tuple[int, int], tuple[RecordedEpisode, bool]],
        whole: dict[tuple[int, int], RecordedEpisode],
    ) -> RecordedEpisode:
        if (group, member) in whole:
            return whole[group, member]
        random = Random(group * 1_000_003 + member)
        if (group, member) not in begun:
            siblings = [one for (other, _), one in whole.items() if other == group]
            return random.choice(siblings or self._whole)
        part = begun[group, member][0]
        longer = [one for one in self._whole if one.generated > part.generated]
        return _continued(part, random.choice(longer)).cut(self._max_len) if longer else part


def _continued(part: RecordedEpisode, longer: RecordedEpisode) -> RecordedEpisode:
    """The part, then what a longer trajectory generated after as many tokens, and its reward."""
    ends = list(accumulate(turn.generated for turn in longer.turns))
    rest = tuple(
        replace(turn, generated=min(turn.generated, end - part.generated))
        for turn, end in zip(longer.turns, ends, strict=True)
        if end > part.generated
    )
    return replace(part, turns=(*part.turns, *rest), reward=longer.reward)


def _episodes(run: PlayedRun) -> dict[tuple[int, int], tuple[RecordedEpisode, bool]]:
    """Return by group and member the last attempt that ended, else the last begun, and whether it
    ended; one that has played no turn is as if it had not begun."""
    turns: dict[TrajectoryId, list[TurnRecord]] = defaultdict(list)
    for row in run.turns:
        turns[TrajectoryId(row.group_id, row.member, row.attempt)].append(row)
    found: dict[tuple[int, int], tuple[RecordedEpisode, bool]] = {}
    for one in sorted(run.trajectories, key=lambda one: (one.state == "finished", one.attempt)):
        who = TrajectoryId(one.group_id, one.member, one.attempt)
        if who in turns:
            episode = _episode(who, turns[who], one.reward or 0.0)
            found[who.group, who.member] = episode, one.state == "finished"
    return found


def _episode(who: TrajectoryId, rows: Sequence[TurnRecord], reward: float) -> RecordedEpisode:
    """What was observed after a turn is what the next prompt has beyond the context so far."""
    rows = sorted(rows, key=lambda row: row.turn)
    ends = [row.prompt_tokens + row.generated_tokens for row in rows]
    observed = [after.prompt_tokens - end for after, end in zip(rows[1:], ends, strict=False)]
    played = tuple(_turn(row, seen) for row, seen in zip(rows, [*observed, 0], strict=True))
    return RecordedEpisode(str(who.group), rows[0].prompt_tokens, played, reward)


def _turn(row: TurnRecord, observed: Tokens) -> Turn:
    worst = max((call.outcome for call in row.tools), key=_SEVERITY.index, default=None)
    return Turn(
        generated=max(1, row.generated_tokens),
        observation=max(0, observed),
        tool=row.tools[0].tool if row.tools else "",
        outcome=worst,
        tool_s=sum(call.latency_s for call in row.tools),
    )
