"""When to look for a better plan: one law for a live run and for the simulator.

The first look is due as soon as steps tell something, since the first plan may be made of guesses.
After that one is due every ``period`` steps; when one half waited for the other for at least
``IDLE`` of a step, either way, and not for the same half again until its waiting has fallen below
``CALM``; and when the mean length has drifted since the last look. These two not within
``COOLDOWN`` steps of the last look or move, nor before as many steps as may be in flight have
passed since.

What was measured is judged by the mean of the last ``steps_to_average``.
"""

from __future__ import annotations

from collections.abc import Mapping

from libra_cli.core.planning.admission import drifted

IDLE = 0.15
CALM = 0.10
COOLDOWN = 3
FILLING = 1
"""Steps at the beginning that tell nothing: training waits for the first trajectories to grow."""


class ReplanTriggers:
    """Asked once a step. ``overlap``: steps whose trajectories may be in flight together."""

    def __init__(self, period: int, overlap: float) -> None:
        self._period = period
        self._cooldown = cooldown(overlap)
        self._since = 0
        #: The halves whose waiting has been looked at, and goes on since.
        self._looked_at: set[str] = set()
        self._looked_length = 0.0
        self._ever_looked = False

    def due(self, idle: Mapping[str, float], length: float, *, may: bool = True) -> str:
        """Why to look now, if there is a reason and one ``may``; ``idle`` is what share of a step
        which half waited, ``length`` the mean one of late."""
        self._since += 1
        self._looked_length = self._looked_length or length
        self._looked_at -= {half for half, share in idle.items() if share < CALM}
        why = self._reason(idle, length) if may else ""
        if why:
            self._since, self._looked_length, self._ever_looked = 0, length, True
            self._looked_at |= {half for half, share in idle.items() if share >= IDLE}
        return why

    def rest(self) -> None:
        """There is a new plan, or somebody looks for another reason: not again at once."""
        self._since = 0

    def _reason(self, idle: Mapping[str, float], length: float) -> str:
        if self._since >= self._period:
            return f"{self._since} steps have passed"
        if self._since < self._cooldown:
            return ""
        waiting = {half: share for half, share in idle.items() if share >= IDLE}
        if news := waiting.keys() - self._looked_at:
            who = max(sorted(news), key=lambda half: waiting[half])
            return f"{who} waited for {waiting[who]:.0%} of a step"
        if drifted(self._looked_length, length):
            return f"mean length went from {self._looked_length:,.0f} to {length:,.0f} tokens"
        first = not self._ever_looked and self._since >= self._cooldown + FILLING
        return "the first steps have been measured" if first else ""


def cooldown(overlap: float) -> int:
    """Steps after a look or a move in which nothing that was measured is a reason to look."""
    return max(COOLDOWN, round(overlap))


def steps_to_average(overlap: float) -> int:
    """How many steps measurements are averaged over: twice as many as may be in flight.

    Trajectories begun together end together, and the oldest are waited for: single steps are far
    too long or too short.
    """
    return max(1, round(2 * overlap))
