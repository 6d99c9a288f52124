"""The two halves of an algorithm, as ``training.advantage`` and ``training.loss`` name them.

Both do nothing by default. A half of libra's own says what it needs in ``config.algorithms``, and
here only what no other has: rules, and what the controller computes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from libra_cli.config.problems import Problem
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import TrainSample
from libra_cli.core.advantages.protocol import Estimator
from libra_cli.core.rollout.teaching import TeacherQueue
from libra_cli.core.types import Branch, Trajectory

Rules: TypeAlias = Callable[[Recipe], Iterator[Problem]]
Turns: TypeAlias = tuple[tuple[int, int, float], ...]
"""The turns of a branch: the number, the index of the first token and the reward of each."""


def no_turns(trajectory: Trajectory, branch: int | None) -> Turns:
    """Return no turns, for the estimators whose advantages the controller computes."""
    return ()


@dataclass(frozen=True, slots=True)
class Advantage:
    """What ``training.advantage`` names: an estimator, its rules,
    and the turns it tells the trainer.
    """

    estimate: Estimator
    problems: Rules | None = None
    """The rules that a recipe with it has beside those of all."""
    turns_of: Callable[[Trajectory, int | None], Turns] = no_turns
    """Returns the turns that the trainer is sent of a branch; None is the trajectory's own branch.
    """


@dataclass(frozen=True, slots=True)
class Objective:
    """The controller's part of the loss that ``training.loss`` names."""

    recipe: Recipe

    def problems(self) -> Iterator[Problem]:
        """Yield the broken rules that a recipe with this loss has beside those of all."""
        yield from ()

    def _term_problems(self) -> Iterator[Problem]:
        """Yield the terms that the recipe adds to a loss which has none."""
        training = self.recipe.training
        for key in ("entropy_coef", "kl_in_reward"):
            if getattr(training, key):
                yield Problem(
                    (f"training.{key}", "training.loss"),
                    f"is {getattr(training, key)}, but the loss {training.loss} has no such term: "
                    "leave it out",
                )

    def teacher(self) -> TeacherQueue | None:
        """Return the queue of the teacher that judges a trajectory
        before it ends; None without a teacher.
        """
        return None

    def by_token(self, tokens: Branch, runs: Sequence[tuple[int, float]]) -> array[float] | None:
        """Return the advantage of each token of a branch; None where one a turn suffices."""
        return None

    def told(
        self, tokens: Branch, runs: Sequence[tuple[int, float]]
    ) -> Sequence[tuple[int, float]]:
        """Return the advantages of a branch as monitors show them:
        (token, value), from this token on.
        """
        return runs

    def metrics_of(self, samples: Iterable[TrainSample]) -> dict[str, float | None]:
        """Metrics that a step has beside those of all, or other values of those."""
        return {}
