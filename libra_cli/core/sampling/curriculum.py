"""A curriculum from the run's own success rates: tasks that teach are played more often.

A *pool* is the first so many tasks of the prompt stream. It is gone through round after round. A
task that was never played is played; so is one whose success lies between ``low`` and ``high``,
both excluded. Another is passed over, and played in every ``revisit``-th round only, since the
policy changes and with it what is too easy or too hard (prime-rl has such pools of easy and hard
tasks). Success is the mean reward of the group that was played last, averaged with what it was
before. All of it follows from the order in which groups end, and stands in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from libra_cli.core.types import GroupId


@dataclass(slots=True)
class Curriculum:
    """The task of each group, and how well each task went."""

    pool: int
    """Tasks of the pool."""
    low: float
    high: float
    revisit: int
    """A task outside of these bounds is played once in this many rounds."""
    visits: int = 0
    """Tasks that were looked at, over all rounds."""
    success: dict[int, float] = field(default_factory=dict)
    passed_over: dict[int, int] = field(default_factory=dict)
    """Rounds in a row in which a task was passed over, by task."""
    task_of: dict[GroupId, int] = field(default_factory=dict)
    """The task of each group that is not forgotten yet."""

    def deal(self, group: GroupId) -> int:
        """Return the task that a new group plays: the next one that
        teaches, or is due to be tried again.
        """
        while not self._is_wanted(task := self.visits % self.pool):
            self.visits += 1
        self.visits += 1
        self.passed_over.pop(task, None)
        self.task_of[group] = task
        return task

    def _is_wanted(self, task: int) -> bool:
        if task not in self.success or self.teaches(task):
            return True
        self.passed_over[task] = self.passed_over.get(task, 0) + 1
        return self.passed_over[task] >= self.revisit

    def teaches(self, task: int) -> bool:
        """Whether the success of a task that was played lies between the bounds."""
        return self.low < self.success[task] < self.high

    def ended(self, group: GroupId, rewards: Sequence[float]) -> None:
        """Take the rewards of a group into the success of its task."""
        task, now = self.task_of[group], fmean(rewards)
        self.success[task] = (self.success.get(task, now) + now) / 2

    def forget(self, group: GroupId) -> None:
        """Forget a group that will not be played again."""
        self.task_of.pop(group, None)

    def metrics(self) -> dict[str, float]:
        """Return how many tasks of the pool were played, and how many of them teach."""
        return {
            "tasks_played": len(self.success),
            "tasks_in_band": sum(map(self.teaches, self.success)),
        }

    def position(self, groups: Collection[GroupId]) -> dict[str, Any]:
        """Return what a checkpoint keeps of the curriculum, with the tasks of these groups."""
        return {
            "visits": self.visits,
            "success": sorted(self.success.items()),
            "passed_over": sorted(self.passed_over.items()),
            "tasks": [[group, self.task_of[group]] for group in groups],
        }

    def restore(self, position: dict[str, Any]) -> None:
        self.visits = int(position["visits"])
        self.success = {int(task): float(value) for task, value in position["success"]}
        self.passed_over = {int(task): int(rounds) for task, rounds in position["passed_over"]}
        self.task_of = {int(group): int(task) for group, task in position["tasks"]}
