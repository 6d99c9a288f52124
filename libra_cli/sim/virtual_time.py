"""Virtual time: a heap of events and the time of the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from libra_cli.core.actions import Wake
from libra_cli.core.events import Event, TimerFired
from libra_cli.core.types import Seconds, SlotId
from libra_cli.sim.engine import Engine

Milestone = tuple[SlotId, Engine]
"""An engine of a slot has something to tell."""
Happening = Callable[[], None]
"""Something happens beside the machine, which may put events on the heap."""


class VirtualTime:
    """A heap of events, milestones and happenings; of two at the same time the one that was put
    there first."""

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._heap: list[tuple[Seconds, int, Event | Milestone | Happening]] = []
        self._order = count()

    def later(self, event: Event, after_s: Seconds) -> None:
        """Put an event on the heap, ``after_s`` seconds from now."""
        self.at(self.now + after_s, event)

    def perform(self, action: Wake) -> None:
        """A timer fires when its time has come."""
        self.later(TimerFired(action.name), action.after_s)

    def at(self, when: Seconds, what: Event | Milestone | Happening) -> None:
        """Put an event or something else on the heap, at the time ``when``."""
        heapq.heappush(self._heap, (when, next(self._order), what))

    def next(self) -> Event | Milestone | Happening:
        """Take what is earliest off the heap, and set the time to when it happens."""
        self.now, _, what = heapq.heappop(self._heap)
        return what
