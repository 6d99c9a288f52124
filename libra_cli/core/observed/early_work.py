"""What the first trajectories tell before a step of their work has been timed."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from libra_cli.config.recipe import LengthsSpec
from libra_cli.core.costs.survival import TurnSurvival
from libra_cli.core.workload import TrajectorySample, Workload

TOLD = 32
"""Trajectories that the recipe's lengths count for until the first steps' worth is trained. Chosen:
what the first 8 tell may be a third of the truth, and lengths told twice too short cost little."""


class EarlyWork:
    """The trajectories that have finished while the first steps' worth is in flight, and those that
    have begun and finished since the newest step, which tell the work where the next is overdue.

    Those that finish first are the short ones, so both are told with those under way.
    """

    def __init__(self) -> None:
        #: Whether the work is to be told by what has begun since the newest step alone, since the
        #: next one is overdue: what was measured before is of other work.
        self.overdue = False
        #: None once the first steps' worth has been trained.
        self._first: list[TrajectorySample] | None = []
        self._since_step: list[TrajectorySample] = []
        #: How many have begun since the newest step.
        self._begun = 0

    def run_begins(self, *, is_known: bool) -> None:
        """A run begins, or goes on with work that ``is_known``."""
        self._first = None if is_known else []

    def filled(self) -> None:
        """The first steps' worth has been trained."""
        self._first = None

    def step(self) -> None:
        """A step is done."""
        self._since_step.clear()
        self._begun = 0

    def began(self) -> None:
        """A trajectory has begun."""
        self._begun += 1

    def finished(self, sample: TrajectorySample, *, is_new: bool) -> None:
        """Add a trajectory, which may have begun since the newest step (``is_new``)."""
        if self._first is not None:
            self._first.append(sample)
        elif is_new:
            self._since_step.append(sample)

    @property
    def filling(self) -> bool:
        """Whether the first steps' worth is in flight."""
        return self._first is not None

    @property
    def ended(self) -> list[TrajectorySample]:
        """The finished ones of those that tell the work now; empty where the newest of all tell
        it."""
        return self._since_step if self.overdue else self._first or []

    def error(self, done: Iterable[TrajectorySample], alive: list[TrajectorySample]) -> float:
        """Standard error of the turns expected, as a share; infinite where none is known, and while
        most of those that have begun in an overdue step have not played a turn.

        ``done`` have played all their turns, ``alive`` one or more of them.
        """
        if not self.ended:
            return inf
        if self.overdue and 2 * (len(self.ended) + len(alive)) < self._begun:
            return inf
        ended = (one.turns for one in (*self.ended, *done))
        return TurnSurvival(ended, (one.turns for one in alive)).error

    def toward(self, told: LengthsSpec | None, work: Workload, known: int) -> Workload:
        """Return the work that ``known`` trajectories tell, weighed against the lengths that the
        recipe has ``told``: those that end first are short however few turns they have.
        """
        if told is None or not self.filling:
            return work
        mean = (known * work.mean_generated + TOLD * told.generated) / (known + TOLD)
        return work.stretched(mean / work.mean_generated)
