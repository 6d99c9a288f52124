"""Finds the groups that the trainer dies of: those that were in its messages when it died."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from libra_cli.core.rollout.groups import Group

MAX_DEATHS = 2
"""Deaths of the trainer that a group may have been in, before it is sent to it alone: one may
happen to any batch."""


class FatalGroupDetector:
    """Counts, for each group, the deaths of the trainer since a step was done with the group."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return any(deaths >= MAX_DEATHS for deaths in self._deaths.values())

    def include(self, groups: Iterable[Group]) -> bool:
        """Whether one of the groups is suspect, so that they are to be sent one at a time."""
        return any(self._deaths[str(group)] >= MAX_DEATHS for group in groups)

    def died_with(self, sent: list[Group]) -> list[Group]:
        """Count a death of the trainer with these groups; return those found guilty.

        Only a suspect that was sent alone is found guilty.
        """
        if len(sent) == 1 and self.include(sent):
            self.cleared(sent)
            return sent
        self._deaths.update(str(group) for group in sent)
        return []

    def cleared(self, groups: Iterable[Group]) -> None:
        """Forget the deaths of groups that a step was done with, or that are gone."""
        for group in groups:
            self._deaths.pop(str(group), None)
