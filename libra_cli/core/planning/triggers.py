"""When to look for a better plan: one law for a live run and for the simulator.

    one half waited for more than ``MOST`` of each of ``MOST_STEPS`` steps    at once
    a first step has been timed                                               at once
    before that, and where a step lasts ``OVERDUE`` times the longest,
    trajectories have ended that tell the lengths of the others               at most every 5 s
    one half waited for at least ``IDLE`` of a step                           after a rest
    the work has drifted since the last look: lengths, turns, contexts,
    tools, or what is played for each trajectory that is trained              after a rest
    the first steps tell something, since the first plan may be guesses       after a rest
    ``period`` steps have passed                                              always

The same half's waiting is no reason again until it has fallen below ``CALM``, but one that was
looked at at once is looked at again after a rest, when more is measured. A rest is ``COOLDOWN``
steps since the last look or move, or as many as may be in flight.

What was measured is judged by the mean of the last ``steps_to_average``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from libra_cli.core.planning.admission import drifted
from libra_cli.core.types import Seconds

IDLE = 0.15
CALM = 0.10
MOST = 0.5
"""Share of a step: a half that waits for more of it has at least twice the GPUs it needs."""
MOST_STEPS = 2
"""Steps in a row, so that no single batch of stragglers starts a look."""
COOLDOWN = 3
LEAST_ENDED = 8
"""Trajectories that have to have finished before they are asked what the others will be like."""
MOST_ERROR = 0.25
"""Standard error of the mean turns, a share of them, from which on it tells too little. Chosen."""
MORE = 2
"""Times as many have to have finished for another look by the clock."""
EVERY_S: Seconds = 5.0
OVERDUE = 3
"""A step that lasts so many times as long as the longest of the newest ones may be of other work.
Chosen."""
FILLING = 1
"""Steps at the beginning that tell nothing: training waits for the first trajectories to grow."""


class ReplanTriggers:
    """The rules of when to plan again; asked once a step, and by the clock where that is said.

    ``overlap`` are the steps whose trajectories may be in flight together.
    """

    def __init__(self, period: int, overlap: float) -> None:
        self._period = period
        self._cooldown = cooldown(overlap)
        self._since = 0
        #: The halves whose waiting has been looked at, and goes on since; and those at once.
        self._looked_at: set[str] = set()
        self._hurried: set[str] = set()
        #: Steps in a row, since the last look or move, that a half waited for most of.
        self._mostly: dict[str, int] = {}
        #: What the work was like at the last look.
        self._looked_work: dict[str, float] = {}
        self._ever_looked = False
        #: Whether there was a look at the first step; whether a step has been timed.
        self._begun = False
        self._timed = False
        #: Trajectories that had finished at the last look by the clock, 0 if there was none since
        #: the newest step; when the next may be.
        self._glanced = 0
        self._glances_at: Seconds = -inf

    def due(self, idle: Mapping[str, float], work: Mapping[str, float], *, may: bool = True) -> str:
        """Return why to plan now; empty if there is no reason, or planning is not allowed
        (``may``).

        ``idle`` is the share of a step that each half waited, ``work`` what trajectories were like
        of late: means of at least 1, each by its name in words.
        """
        self._since += 1
        self._timed, self._glanced = True, 0
        self._looked_work = {**work, **self._looked_work}
        calm = {half for half, share in idle.items() if share < CALM}
        self._looked_at -= calm
        self._hurried -= calm
        self._mostly = {
            half: self._mostly.get(half, 0) + 1 for half, share in idle.items() if share > MOST
        }
        if not may:
            self._mostly.clear()
            return ""
        return self._reason(idle, work) or self._early() or self._hurry(idle)

    @property
    def by_clock(self) -> bool:
        """Whether no step has been timed yet of the work that the newest look saw, so that the
        clock said when."""
        return not self._timed or self._glanced > 0

    def glance(self, ended: int, error: Callable[[], float], *, overdue: bool, now: Seconds) -> str:
        """Return why to plan by the clock, while no step has been timed or one is ``overdue``;
        empty if nothing is told.

        ``ended`` trajectories have finished, and the standard ``error`` of what they tell is asked
        for only where it matters.
        """
        more = ended >= max(LEAST_ENDED, MORE * self._glanced)
        is_known = self._timed and not overdue
        if is_known or not more or now < self._glances_at:
            return ""
        self._glances_at = now + EVERY_S
        if error() > MOST_ERROR:
            return ""
        self._glanced = ended
        late = f"a step takes {OVERDUE} times the longest of late, and " if overdue else ""
        return f"{late}{ended} trajectories have ended"

    def overlaps(self, steps: float, *, after: int) -> None:
        """The trajectories of another number of steps may be in flight together from now on, and a
        rest begins ``after`` so many steps, which tell nothing yet.
        """
        self._cooldown = cooldown(steps)
        self.rest()
        self._since = -after

    def rest(self) -> None:
        """Begin a rest, in which no reason counts: there is a new plan, or one was looked for."""
        self._since = 0
        self._mostly.clear()

    def _reason(self, idle: Mapping[str, float], work: Mapping[str, float]) -> str:
        why = f"{self._since} steps have passed" if self._since >= self._period else ""
        if not why and self._since >= self._cooldown:
            why = self._rested(idle, work)
        if why:
            self.rest()
            self._looked_work, self._ever_looked = dict(work), True
            self._looked_at |= {half for half, share in idle.items() if share >= IDLE}
        return why

    def _rested(self, idle: Mapping[str, float], work: Mapping[str, float]) -> str:
        waiting = {half: share for half, share in idle.items() if share >= IDLE}
        if news := waiting.keys() - self._looked_at:
            return _waited(news, idle)
        for name, now in work.items():
            if drifted(before := self._looked_work[name], now):
                return f"{name} went from {before:,.3g} to {now:,.3g}"
        first = not self._ever_looked and self._since >= self._cooldown + FILLING
        return "the first steps have been measured" if first else ""

    def _early(self) -> str:
        """Return a reason to look when a first step has been timed;
        no other reason is used up by it.
        """
        first, self._begun = not self._begun, True
        if not first:
            return ""
        self.rest()
        return "the run has begun"

    def _hurry(self, idle: Mapping[str, float]) -> str:
        """Return a reason to look before the rest is over, once for
        each half; no other is used up by it.
        """
        long = {half for half, steps in self._mostly.items() if steps >= MOST_STEPS}
        if not (news := long - self._hurried - self._looked_at):
            return ""
        self.rest()
        self._hurried |= news
        return _waited(news, idle)


def _waited(halves: set[str], idle: Mapping[str, float]) -> str:
    who = max(sorted(halves), key=lambda half: idle[half])
    return f"{who} waited for {idle[who]:.0%} of a step"


def cooldown(overlap: float) -> int:
    """Steps after a look or a move in which nothing that was measured is a reason to look."""
    return max(COOLDOWN, round(overlap))


def steps_to_average(overlap: float) -> int:
    """Return how many steps measurements are averaged over: twice as many as may be in flight.

    Trajectories begun together end together, and the oldest are waited for: single steps are far
    too long or too short.
    """
    return max(1, round(2 * overlap))
