"""When evaluations begin, which trajectories of theirs are yet to be played, and their results.

    due --a version is served--> RUNNING --its last trajectory ends--> FINISHED
                                    |
                                    +--the run ends before, or it----> CUT
                                       cannot come to an end

An evaluation of an entry of the recipe begins at the first version that the servers are told of
once it is due, and is of that version as far as possible: each trajectory records the versions that
it was generated with, and the result their mean. While it is played the entry is not begun again;
what falls due meanwhile is made up for by one evaluation of the version that is newest then. It is
begun again, too, where the trainer went back to a checkpoint before it.

Trajectories begin in the order of their tasks. One whose environment breaks is played again, up to
``retries`` times, and then counts as failed, which is no reward. An evaluation is hopeless once
``MAX_FAILED`` have failed and none has come to its end since.

Evaluations that were under way when a run ended are played anew when it goes on, if they are due;
those that a killed controller has left are cut then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from libra_cli.config.recipe import Recipe
from libra_cli.core.evaluation.estimates import evaluation_metrics
from libra_cli.core.evaluation.groups import EvaluatedTask, evaluated_task
from libra_cli.core.lifecycle import follow
from libra_cli.core.records import EvaluationRecord, Record, to_metrics_json
from libra_cli.core.types import Seconds, Tokens, Trajectory, TrajectoryId, WeightVersion

MAX_FAILED = 32
"""Trajectories of one evaluation that fail one after the other, with none that ends in between: as
many as groups that are given up before a run is (``trajectories.MAX_DROPPED``)."""
ESTIMATES = 64
"""Times that an evaluation is estimated while it is played: each takes time by its tasks, so that
once for every trajectory would be by their square."""


class EvaluationState(StrEnum):
    """The states of an evaluation, as its row has them."""

    RUNNING = "running"
    FINISHED = "finished"
    CUT = "cut"


TRANSITIONS: dict[EvaluationState, dict[EvaluationState, str]] = {
    EvaluationState.RUNNING: {
        EvaluationState.FINISHED: "its last trajectory has ended",
        EvaluationState.CUT: "the run ends before its last trajectory, or that never would",
    },
    EvaluationState.FINISHED: {},
    EvaluationState.CUT: {},
}


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """An entry of the recipe, as the ledger plays it; ``every`` is in steps, 0 for never."""

    name: str
    num_tasks: int
    samples: int
    success: float
    every: int
    at_start: bool
    at_end: bool

    def newest_due(self, step: int, target: int) -> int | None:
        """The newest step up to this one that has an evaluation, of a run that ends with
        ``target``; None if there is none."""
        due = [0] if self.at_start else []
        if self.every and step >= self.every:
            due.append(step - step % self.every)
        if self.at_end and step >= target:
            due.append(step)
        return max(due, default=None)


def evaluation_plans(recipe: Recipe) -> tuple[EvaluationPlan, ...]:
    """Return the evaluations of a recipe, in its order."""
    return tuple(
        EvaluationPlan(
            name,
            spec.num_tasks,
            spec.samples,
            spec.success,
            recipe.evaluation_every(entry),
            spec.at_start,
            spec.at_end,
        )
        for entry, (name, spec) in enumerate(
            zip(recipe.evaluation_names, recipe.evaluation, strict=True)
        )
    )


@dataclass(slots=True)
class Evaluation:
    """One evaluation, of the weights ``version`` as far as possible."""

    number: int
    entry: int
    plan: EvaluationPlan
    version: WeightVersion
    started_at: Seconds
    state: EvaluationState = EvaluationState.RUNNING
    #: Trajectories that were begun for the first time; and those that are played now.
    begun: int = 0
    playing: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    failed: int = 0
    #: Since one came to its end.
    failed_in_a_row: int = 0
    #: Of the trajectories that have ended: rewards by task, lengths and turns.
    rewards: dict[int, list[float]] = field(default_factory=dict)
    lengths: list[Tokens] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    #: Generated tokens by the step of the version that generated them.
    tokens: dict[int, Tokens] = field(default_factory=dict)
    #: What was estimated last, as its row has it.
    _estimated: str = "{}"

    @property
    def wanted(self) -> int:
        """The number of trajectories of all its tasks."""
        return self.plan.num_tasks * self.plan.samples

    @property
    def is_over(self) -> bool:
        """Whether no trajectory is left to be played."""
        return self.begun == self.wanted and not self.playing

    @property
    def is_hopeless(self) -> bool:
        """Whether what is left of it would fail as well."""
        return self.failed_in_a_row >= MAX_FAILED

    def next_id(self) -> TrajectoryId:
        """Return the id of the next trajectory that was never begun, and count it as begun."""
        task, member = divmod(self.begun, self.plan.samples)
        self.begun += 1
        return TrajectoryId(EvaluatedTask(self.number, self.entry, task).group, member)

    def take(self, ended: Trajectory, reward: float) -> None:
        """Add the reward, length, turns and versions of a trajectory that ended."""
        task = evaluated_task(ended.id.group).task
        self.failed_in_a_row = 0
        self.rewards.setdefault(task, []).append(reward)
        self.lengths.append(ended.generated)
        self.turns.append(ended.turns)
        for branch in ended.branches:
            for span in branch.spans:
                known = self.tokens.get(span.version, 0)
                self.tokens[span.version] = known + span.end - span.start

    def record(self, now: Seconds) -> EvaluationRecord:
        """Return the evaluation's row; metrics are estimated again
        only now and then, and at the end.
        """
        ended = len(self.lengths)
        is_due = ended % max(1, self.wanted // ESTIMATES) == 0
        if ended and (is_due or self.state is not EvaluationState.RUNNING):
            self._estimated = to_metrics_json(self._metrics())
        generated = sum(self.tokens.values())
        weighed = sum(step * count for step, count in self.tokens.items())
        return EvaluationRecord(
            evaluation=self.number,
            name=self.plan.name,
            step=self.version.step,
            trainer_incarnation=self.version.trainer_incarnation,
            state=self.state,
            started_at=self.started_at,
            ended_at=None if self.state is EvaluationState.RUNNING else now,
            tasks=self.plan.num_tasks,
            samples=self.plan.samples,
            finished=ended,
            failed=self.failed,
            version_mean=weighed / generated if generated else None,
            generated_tokens=generated,
            metrics_json=self._estimated,
        )

    def _metrics(self) -> dict[str, float]:
        rewards = [self.rewards[task] for task in sorted(self.rewards)]
        return {
            **evaluation_metrics(rewards, samples=self.plan.samples, success=self.plan.success),
            "length": fmean(self.lengths),
            "turns": fmean(self.turns),
        }


class EvaluationLedger:
    """The evaluations of a run that are not over yet."""

    def __init__(
        self,
        plans: Sequence[EvaluationPlan],
        retries: int,
        make: Callable[[TrajectoryId, Seconds], Trajectory],
    ) -> None:
        """Take the recipe's evaluations; ``make`` makes a trajectory of an id, begun at a time."""
        self._plans = tuple(plans)
        self._retries = retries
        self._make = make
        self._next_number = 0
        #: The step of the version of each entry's newest evaluation; -1 before the first.
        self._newest = [-1] * len(self._plans)
        self.running: dict[int, Evaluation] = {}
        """Evaluations under way, by number."""
        self._failures: dict[tuple[int, int], int] = {}
        #: The newest rows of those that a killed controller has left under way.
        self._left: list[EvaluationRecord] = []
        self.went_on_at: Seconds = 0.0
        """The last time that an evaluation began, or that a turn of one came back."""
        self._closed = False

    @property
    def playing(self) -> int:
        """The number of trajectories being played."""
        return sum(len(one.playing) for one in self.running.values())

    def remember(
        self, records: Iterable[Record], step: int, still_holds: Callable[[int, int], bool]
    ) -> None:
        """Go on from ``step``: the rows that the run wrote before tell what is evaluated.

        ``still_holds`` says of a step and a trainer incarnation whether its weights are of the
        run's own past.
        """
        names = [plan.name for plan in self._plans]
        newest = {one.evaluation: one for one in records if isinstance(one, EvaluationRecord)}
        self._left = [one for one in newest.values() if one.state == EvaluationState.RUNNING]
        for record in newest.values():
            self._next_number = max(self._next_number, record.evaluation + 1)
            done = record.state == EvaluationState.FINISHED and record.step <= step
            holds = still_holds(record.step, record.trainer_incarnation)
            if done and holds and record.name in names:
                entry = names.index(record.name)
                self._newest[entry] = max(self._newest[entry], record.step)

    def cut_left(self, *, now: Seconds) -> Iterator[EvaluationRecord]:
        """Cut the evaluations that a killed controller left under way: no process finishes them."""
        left, self._left = self._left, []
        for record in left:
            yield replace(record, state=EvaluationState.CUT, ended_at=now)

    def begin_due(
        self, latest: WeightVersion, *, target: int, now: Seconds
    ) -> Iterator[EvaluationRecord]:
        """Begin what is due, of the newest version; ``target`` is the run's last step."""
        playing = {one.entry for one in self.running.values()}
        for entry, plan in enumerate(self._plans):
            self._newest[entry] = min(self._newest[entry], latest.step)
            if entry in playing or not self._is_due(entry, latest.step, target):
                continue
            self._newest[entry] = latest.step
            begun = Evaluation(self._next_number, entry, plan, latest, now)
            self.running[begun.number] = begun
            self.went_on_at = now
            self._next_number += 1
            yield begun.record(now)

    def close(self) -> None:
        """Begin no further evaluation."""
        self._closed = True

    def _is_due(self, entry: int, step: int, target: int) -> bool:
        if self._closed:
            return False
        due = self._plans[entry].newest_due(step, target)
        return due is not None and due > self._newest[entry]

    def is_done(self, target: int) -> bool:
        """Whether nothing is left to be evaluated of a run that has reached its last step."""
        entries = range(len(self._plans))
        return not self.running and not any(self._is_due(one, target, target) for one in entries)

    def next_trajectory(self, now: Seconds) -> Trajectory | None:
        """Return the next trajectory to begin, of the oldest evaluation
        with one left; None if all are begun.
        """
        for one in self.running.values():
            if one.begun < one.wanted:
                return self._play(one, one.next_id(), now)
        return None

    def _play(self, evaluation: Evaluation, who: TrajectoryId, now: Seconds) -> Trajectory:
        trajectory = evaluation.playing[who] = self._make(who, now)
        return trajectory

    def find(self, who: TrajectoryId) -> Trajectory | None:
        """Return the trajectory of this id; None unless it is being played."""
        one = self.running.get(evaluated_task(who.group).evaluation)
        return one.playing.get(who) if one else None

    def finish(self, ended: Trajectory, reward: float, *, now: Seconds) -> EvaluationRecord:
        """Give a trajectory its reward, and return the row of its evaluation."""
        one = self._of(ended.id)
        del one.playing[ended.id]
        ended.reward = reward
        one.take(ended, reward)
        return self._told(one, now)

    def begin_again(self, who: TrajectoryId, *, now: Seconds, counts: bool) -> Trajectory | None:
        """Return a new attempt at a trajectory that broke; None if
        that has been tried too often.
        """
        one, member = self._of(who), (who.group, who.member)
        self._failures[member] = self._failures.get(member, 0) + counts
        if self._failures[member] > self._retries:
            return None
        del one.playing[who]
        return self._play(one, who._replace(attempt=who.attempt + 1), now)

    def give_up(self, who: TrajectoryId, *, now: Seconds) -> EvaluationRecord:
        """Count a trajectory that has failed for good, and return the row of its evaluation."""
        one = self._of(who)
        del one.playing[who]
        one.failed += 1
        one.failed_in_a_row += 1
        return self._told(one, now)

    def _of(self, who: TrajectoryId) -> Evaluation:
        return self.running[evaluated_task(who.group).evaluation]

    def _told(self, one: Evaluation, now: Seconds) -> EvaluationRecord:
        if one.is_over:
            self._end(one, EvaluationState.FINISHED)
        return one.record(now)

    def _end(self, one: Evaluation, state: EvaluationState) -> None:
        one.state = follow(TRANSITIONS, one.state, state, f"evaluation {one.number}")
        del self.running[one.number]
        self._failures = {
            member: count
            for member, count in self._failures.items()
            if evaluated_task(member[0]).evaluation != one.number
        }

    def hopeless(self, who: TrajectoryId) -> Evaluation | None:
        """Return the evaluation of a trajectory, if it is under way
        and cannot come to an end; else None.
        """
        one = self.running.get(evaluated_task(who.group).evaluation)
        return one if one is not None and one.is_hopeless else None

    def cut(self, one: Evaluation, *, now: Seconds) -> EvaluationRecord:
        """End the evaluation; what is under way of it is not finished."""
        one.playing.clear()
        self._end(one, EvaluationState.CUT)
        return one.record(now)

    def check(self) -> None:
        """Raise AssertionError if a running evaluation has lost a
        trajectory, or should have ended.
        """
        for number, one in self.running.items():
            assert (one.number, one.state) == (number, EvaluationState.RUNNING)
            done = len(one.lengths) + one.failed
            assert done + len(one.playing) == one.begun, f"evaluation {number} has lost one"
            assert not one.is_over, f"evaluation {number} does not end"
            assert all(member.reward is None for member in one.playing.values()), number
