"""What tools take, now and in the newest trajectories."""

from __future__ import annotations

from collections import deque
from math import exp, log
from statistics import fmean

from libra_cli.core.types import Seconds

RECENT_TOOLS = 1024
"""Newest turns that say how long tools and servers take now."""


class ToolTimes:
    """The time that tools take now, and took in the newest trajectories that have ended."""

    def __init__(self, finished: int) -> None:
        self._now: deque[Seconds] = deque(maxlen=RECENT_TOOLS)
        self._on_servers: deque[Seconds] = deque(maxlen=RECENT_TOOLS)
        #: Seconds of the returns since the newest step, and their number.
        self._since_step: tuple[Seconds, int] = (0.0, 0)
        self._turn_s: Seconds = 1.0
        #: Of each trajectory: seconds in tools, and the number of their returns.
        self._finished: deque[tuple[Seconds, int]] = deque(maxlen=finished)

    def returned(self, tool_s: Seconds) -> None:
        """Add the ``tool_s`` seconds between a turn and the next one."""
        self._now.append(tool_s)
        seconds, number = self._since_step
        self._since_step = seconds + tool_s, number + 1

    def played(self, seconds: Seconds) -> None:
        """A turn has been in a queue and on a server."""
        self._on_servers.append(seconds)

    def finished(self, tool_s: Seconds, returns: int) -> None:
        """Add a trajectory that has ended, with its seconds in
        tools and its number of tool returns.
        """
        self._finished.append((tool_s, returns))

    @property
    def stretch(self) -> float:
        """Seconds in play for each one in queues and on servers."""
        if not (self._now and any(self._on_servers)):
            return 1.0
        return 1 + fmean(self._now) / fmean(self._on_servers)

    def take_turn_s(self) -> Seconds:
        """Seconds of a turn in the tool since the last call, and on servers as of late; what it was
        then if no tool has returned."""
        (seconds, number), self._since_step = self._since_step, (0.0, 0)
        if number and any(self._on_servers):
            self._turn_s = fmean(self._on_servers) + seconds / number
        return self._turn_s

    @property
    def factor(self) -> float:
        """How many times as long tools take now, as far as that is more than chance.

        A change r, a logarithm, counts with the weight r^2 / (r^2 + s^2), with s its standard error
        (Stein's estimator).
        """
        then_s = sum(tool_s for tool_s, _ in self._finished)
        if not (then_s and any(self._now)):
            return 1.0
        now, returns = fmean(self._now), sum(number for _, number in self._finished)
        variance = fmean((tool_s / now - 1) ** 2 for tool_s in self._now)
        squared_error = variance * (1 / len(self._now) + 1 / returns)
        change = log(now * returns / then_s)
        return exp(change * change**2 / (change**2 + squared_error)) if change else 1.0
