"""The ids of an evaluation's trajectories: of which evaluation of the recipe, and which task.

    EVALUATION_GROUPS + (evaluation << 28 | entry << 20 | task)

``evaluation`` counts those of the run, from 0; ``entry`` is the place in the recipe's list. Ids
stay below 2 ** 53, so that JSON keeps them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from libra_cli.core.types import EVALUATION_GROUPS, GroupId

MAX_TASKS: Final = 1 << 20
MAX_ENTRIES: Final = 1 << 8
_ROUND = MAX_TASKS * MAX_ENTRIES


class EvaluatedTask(NamedTuple):
    """A task of one round of one evaluation, which its group's number tells."""

    evaluation: int
    """Evaluations of the run that began before this one."""
    entry: int
    """Index of the evaluation in the recipe's list."""
    task: int
    """Index of the task, from 0."""

    @property
    def group(self) -> GroupId:
        """The group id of the task's trajectories."""
        return EVALUATION_GROUPS + self.evaluation * _ROUND + self.entry * MAX_TASKS + self.task


def evaluated_task(group: GroupId) -> EvaluatedTask:
    """The task of a group that is one of an evaluation."""
    evaluation, rest = divmod(group - EVALUATION_GROUPS, _ROUND)
    return EvaluatedTask(evaluation, *divmod(rest, MAX_TASKS))
