"""Decides whether something that should move has stalled.

A process that lives may still do nothing: it is stopped, or waits for a disk or for another. So it
is asked again and again for a *sign*, which is anything that changes while it works, and silence is
what counts. Contract: pure; whoever looks brings the time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from libra_cli.core.types import Seconds

FOUND_S: Seconds = 60.0
"""Seconds within which a stall is found, unless the watched thing has been slower before. Whoever
leaves a run alone asks for that: to them a minute is nothing and half an hour is not.
"""
LEAST_S: Seconds = 50.0
"""The least silence that counts: ``FOUND_S`` without what a look at it may take."""
SLOWEST_FACTOR = 2.0
"""Factor on the longest silence that ended with a sign, up to which silence is allowed."""
LONGEST_LOOK_S: Seconds = 15.0
"""Seconds between two looks beyond which the time was lost by the looking side (a laptop asleep, a
controller that was stopped), and is not the other's silence.
"""


@dataclass(slots=True)
class ProgressWatch:
    """One thing that should move, and the silence seen of it. Times are in seconds."""

    least_s: Seconds = LEAST_S
    silent_s: Seconds = 0.0
    """Seconds without a sign, as far as a sign could have come."""
    slowest_s: Seconds = 0.0
    """The longest silence that ended with a sign."""
    allowed_s: Seconds = 0.0
    """How long its present work may take without a sign; 0 if nothing is known of it."""
    _looked_at: Seconds | None = None
    _sign: Hashable = None

    @property
    def limit_s(self) -> Seconds:
        """The silence from which on it has stalled."""
        return max(self.least_s, self.allowed_s, SLOWEST_FACTOR * self.slowest_s)

    @property
    def is_stalled(self) -> bool:
        """Whether its silence has reached the limit."""
        return self.silent_s >= self.limit_s

    def look(
        self, sign: Hashable, *, now: Seconds, idle: bool = False, reachable: bool = True
    ) -> bool:
        """Take what was seen, and tell whether it has stalled.

        ``sign`` is None if it gave no answer. ``idle``: it has nothing to do, so an answer is sign
        enough. Where it is not ``reachable``, its silence says nothing.
        """
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        passed = min(max(0.0, elapsed), LONGEST_LOOK_S)
        if sign is not None and (idle or sign != self._sign):
            self.slowest_s = max(self.slowest_s, self.silent_s)
            self.silent_s = 0.0
        elif reachable:
            self.silent_s += passed
        if sign is not None:
            self._sign = sign
        return self.is_stalled
