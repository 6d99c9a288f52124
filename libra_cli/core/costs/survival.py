"""How long trajectories will be of which most are still under way: lengths as censored turns.

What has ended first is short. Of those under way it is known how many turns they have at least, so
the chance h[k] of ending at turn k is that of the n[k] that came to have k turns, of which d[k]
ended with them (Kaplan and Meier, doi 10.1080/01621459.1958.10501452)::

    h[k] = d[k] / n[k]        S[k] = (1 - h[1]) ... (1 - h[k])

Nothing is known of turns that nobody ended at. Beyond the last of those there is a chance at every
turn that is the same for all: that of the last ``TAIL`` of the turns that were at risk. Each
trajectory under way is taken to its end by one quantile of the turns that are left to those with as
many, evenly spaced over all of them, with the mean tokens that a turn has added so far.

Guarantee: pure and without chance; where nothing is under way the trajectories are those that have
ended. Limit: turns are taken to be alike in tokens, and trajectories that were given up to be as
long as others. ``lifelines`` and ``scipy.stats`` have the estimator, and bring pandas or scipy to a
controller that has numpy only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, log, sqrt
from statistics import fmean

from libra_cli.core.workload import TrajectorySample

TAIL = 0.1
"""Share of all turns at risk, the last ones, that tell the chance of ending beyond them. Chosen."""
_STEP = (sqrt(5) - 1) / 2
"""Multiples of it, without their whole part, lie evenly between 0 and 1, however many (Weyl)."""


class TurnSurvival:
    """The chance that a trajectory has more than k turns, from ``ended`` ones and those ``alive``.

    ``ended`` are turns of trajectories at their end, ``alive`` turns that others have had so far.
    Raises ValueError where none has ended: any length is possible then.
    """

    def __init__(self, ended: Iterable[int], alive: Iterable[int] = ()) -> None:
        deaths, censored = Counter(ended), Counter(alive)
        if not deaths:
            raise ValueError("no trajectory has ended, so nothing is known of their turns")
        #: Turns at which trajectories ended, how many did, and of how many that came so far.
        self._risks: list[tuple[int, int, int]] = []
        at_risk = sum(deaths.values()) + sum(censored.values())
        for turn in sorted(deaths.keys() | censored.keys()):
            if deaths[turn]:
                self._risks.append((turn, deaths[turn], at_risk))
            at_risk -= deaths[turn] + censored[turn]
        #: The chance of having more turns, by the turns that somebody ended at.
        self._curve: list[tuple[int, float]] = []
        above = 1.0
        for turn, died, number in self._risks:
            above *= 1 - died / number
            self._curve.append((turn, above))
        self.tail = self._tail_hazard()

    def _tail_hazard(self) -> float:
        """Return the chance of ending at a turn beyond those known, from the last ``TAIL``."""
        turns = died = 0
        whole = TAIL * sum(number * gap for (_, _, number), gap in self._gaps())
        for (_, deaths, number), gap in reversed(list(self._gaps())):
            turns, died = turns + number * gap, died + deaths
            if turns >= whole:
                break
        return min(1.0, died / turns)

    def _gaps(self) -> Iterable[tuple[tuple[int, int, int], int]]:
        """Yield what is known of each turn, with the turns since the one before."""
        before = 0
        for risk in self._risks:
            yield risk, risk[0] - before
            before = risk[0]

    def above(self, turns: int) -> float:
        """Return the chance of more than so many turns."""
        known = [chance for turn, chance in self._curve if turn <= turns]
        chance = known[-1] if known else 1.0
        beyond = turns - self._curve[-1][0]
        return chance * (1 - self.tail) ** beyond if beyond > 0 else chance

    def quantile(self, share: float, *, after: int = 0) -> int:
        """Return the turns that a ``share`` (0 to 1) of those with more than ``after`` do not
        exceed: the least k with S[k] <= (1 - share) S[after].
        """
        wanted = (1 - share) * self.above(after)
        for turn, chance in self._curve:
            if turn > after and chance <= wanted:
                return turn
        last, chance = self._curve[-1]
        last, chance = max((last, chance), (after, self.above(after)))
        if self.tail >= 1 or chance <= wanted:
            return last + 1
        return last + max(1, ceil(log(wanted / chance) / log(1 - self.tail)))

    @property
    def error(self) -> float:
        """Standard error of the mean turns over the mean: Greenwood's formula, and the tail's.

        With A[k] the area of S beyond turn k its variance is the sum of A[k]^2 d / (n (n - d)); the
        tail of area A is known as well as the number of those that its chance is counted from.
        """
        chance = self._curve[-1][1]
        area = chance / self.tail if self.tail else 0.0
        mean, areas = area, [0.0] * len(self._curve)
        for place in range(len(self._curve) - 1, -1, -1):
            turn = self._curve[place][0]
            areas[place] = mean
            before, above = self._curve[place - 1] if place else (0, 1.0)
            mean += above * (turn - before)
        variance = sum(
            beyond**2 * died / (number * (number - died))
            for beyond, (_, died, number) in zip(areas, self._risks, strict=True)
            if number > died
        )
        return sqrt(variance + area**2 / self._risks[-1][1]) / mean


def completed(
    ended: Sequence[TrajectorySample], alive: Sequence[TrajectorySample]
) -> tuple[TrajectorySample, ...]:
    """Return the trajectories that have ended, and those under way as they will have.

    ``alive`` are as far as they have come, of a turn or more. Raises ValueError where none has
    ended.
    """
    survival = TurnSurvival((one.turns for one in ended), (one.turns for one in alive))
    every = (*ended, *alive)
    turns = sum(one.turns for one in every)
    grown = [sum(one.generated for one in every) / turns]
    grown.append(sum(one.observed for one in every) / turns)
    tool_s = fmean(one.tool_s for one in every) * len(every) / turns
    found = list(ended)
    for place, one in enumerate(sorted(alive, key=lambda one: (one.turns, one.generated))):
        last = survival.quantile((0.5 + place * _STEP) % 1, after=one.turns)
        more = last - one.turns
        found.append(
            replace(
                one,
                generated=one.generated + round(more * grown[0]),
                observed=one.observed + round(more * grown[1]),
                turns=last,
                tool_s=one.tool_s + more * tool_s,
            )
        )
    return tuple(found)
