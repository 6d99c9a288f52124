"""Which prompts servers may die of: those with a turn inside servers when these died.

    deaths      what follows
    0, 1        nothing: one may happen to any
    2 or more   suspect: it is sent again, with at most ``TOGETHER`` of the worst out at a time
    3 or more   it is sent while no other suspect is out; if the server dies of that, it is guilty

A turn that comes back clears its trajectory. What is counted is deaths in turns that have not come
back yet, over the trajectories of a group, which have one prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from libra_cli.core.types import GroupId, TrajectoryId

SUSPECT = 2
ALONE = 3
TOGETHER = 8
"""Some 64 seats are narrowed down to one prompt by two deaths more, which is within the budget of a
server's restarts (``core.cluster.restarts``)."""


class FatalPromptDetector:
    """The deaths of servers, by the turns that were inside and have not come back."""

    def __init__(self) -> None:
        self._number = 0
        self._deaths: dict[GroupId, dict[TrajectoryId, set[int]]] = {}
        #: How many different deaths these are, by group.
        self._level: dict[GroupId, int] = {}
        #: How often turns broke off that have not come back.
        self._breaks: dict[GroupId, Counter[TrajectoryId]] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths or self._breaks)

    def broke(self, who: TrajectoryId) -> int:
        """Count that the trajectory's turn broke off where all others were answered.

        Returns how many turns of its group have.
        """
        breaks = self._breaks.setdefault(who.group, Counter())
        breaks[who] += 1
        return breaks.total()

    def deaths_of(self, who: TrajectoryId) -> int:
        """Return the number of server deaths that the trajectory's group was part of."""
        return self._level.get(who.group, 0)

    def is_suspect(self, who: TrajectoryId) -> bool:
        """Whether the trajectory is sent only while few other suspects are out."""
        return self.deaths_of(who) >= SUSPECT

    def died(self, inside: Collection[TrajectoryId]) -> list[TrajectoryId]:
        """Count a server's death with these trajectories inside; returns those found guilty."""
        suspects = [who for who in inside if self.is_suspect(who)]
        alone = len({who.group for who in suspects}) == 1
        guilty = suspects[:1] if alone and self.deaths_of(suspects[0]) >= ALONE else []
        self._number += 1
        for who in inside:
            self._deaths.setdefault(who.group, {}).setdefault(who, set()).add(self._number)
            self._count(who.group)
        return guilty

    def has_room(self, who: TrajectoryId, out: Iterable[TrajectoryId]) -> bool:
        """Whether this suspect may be sent while those are out."""
        mine, others = self.deaths_of(who), [self.deaths_of(other) for other in out]
        together = 1 if mine >= ALONE else TOGETHER
        return len(others) < together and mine >= max(others, default=0)

    def cleared(self, who: TrajectoryId) -> None:
        """Forget a trajectory that a turn came back of, or that is gone."""
        breaks = self._breaks.get(who.group, Counter())
        if breaks.pop(who, 0) and not breaks:
            del self._breaks[who.group]
        if self._deaths.get(who.group, {}).pop(who, None) is not None:
            self._count(who.group)

    def _count(self, group: GroupId) -> None:
        deaths = self._deaths[group]
        if deaths:
            self._level[group] = len(set().union(*deaths.values()))
        else:
            del self._deaths[group], self._level[group]
