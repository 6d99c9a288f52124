"""Which groups the trainer may die of: those that were in its messages when it died."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from libra_cli.core.rollout.groups import Group

MAX_DEATHS = 2
"""Deaths of the trainer that a group may have been in, before it is sent to it alone: one may
happen to any batch."""


class FatalGroupDetector:
    """Deaths by group, of those that no step has been done with since."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return any(deaths >= MAX_DEATHS for deaths in self._deaths.values())

    def include(self, groups: Iterable[Group]) -> bool:
        """Whether one of these is suspect, so that they are to be sent one at a time."""
        return any(self._deaths[str(group)] >= MAX_DEATHS for group in groups)

    def died_with(self, sent: list[Group]) -> list[Group]:
        """The trainer died with these in its hands; the ones that are found guilty: a suspect that
        was sent alone, or none."""
        if len(sent) == 1 and self.include(sent):
            self.cleared(sent)
            return sent
        self._deaths.update(str(group) for group in sent)
        return []

    def cleared(self, groups: Iterable[Group]) -> None:
        """A step was done with these, or they are gone."""
        for group in groups:
            self._deaths.pop(str(group), None)
