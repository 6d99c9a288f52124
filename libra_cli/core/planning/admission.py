"""Whether a plan is worth its moves: one law for a live run and for the simulator.

A plan is adopted only if ::

    gain per step x steps until the next expected drift  >  cost of the moves
    gain per step  >=  min_gain x today's step

The next drift is ``DRIFT`` (the change of mean length that makes a plan stale) over the rate at
which lengths are expected to change, within ``HORIZON``, and never beyond the end of the run.

Guarantee: no move without a predicted gain that pays it back. Limit: predictions, and only lengths
count as drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from operator import mul
from statistics import fmean

from libra_cli.core.planning.search import Times
from libra_cli.core.types import Seconds, Tokens

DRIFT = 0.3
HORIZON = (12, 100)
"""Steps, at least and at most. Chosen: with 5 at least, where lengths grow fourfold in 24 steps, a
nearer plan was taken again and again in place of the better one (mint from a bad start: 27 % behind
the best static plan, and 12 % so)."""
FURTHEST = 2.0
"""The most that lengths are expected to change by. Chosen."""
USUAL = 0.05
"""Change of the mean length a step as a share of it, a standard deviation over runs. Chosen:
fourfold in 24 steps is 0.06 a step."""
RECENT = 20
"""Steps whose lengths tell how fast they change."""


@dataclass(frozen=True, slots=True)
class Admission:
    """When a proposed plan is worth its moves."""

    min_gain: float = 0.05
    """A refused gain is regret, so no more of it than that is accepted. Chosen."""
    tolerance: float = 0.02
    """Plans within it of the best are as good, and of them the nearest is taken."""
    horizon: float = inf
    """Steps until the next expected drift, or the end."""

    def why_not(self, before: Times, after: Times, cost_s: Seconds) -> str:
        """Return why the moves are not worth their cost; empty if they are."""
        gain_s = before.step_s - after.step_s
        if gain_s <= 0:
            return "no plan is predicted to be faster"
        if gain_s < self.min_gain * before.step_s:
            return f"a gain of {gain_s / before.step_s:.1%} is below {self.min_gain:.0%}"
        if gain_s * self.horizon <= cost_s:
            return (
                f"{gain_s:.1f} s a step over the {self.horizon:.0f} steps until the next expected "
                f"drift do not pay back {cost_s:.1f} s of moves"
            )
        return ""


def horizon(lengths: Sequence[float], steps_left: int | None, spread: float) -> float:
    """Steps until the next expected drift, or the end; infinite where nothing has run yet.

    ``lengths`` are the mean generated tokens of a trajectory, one a step, and ``spread`` the
    standard deviation of one of them, as a share of it.
    """
    if not lengths and steps_left is None:
        return inf
    least, most = HORIZON
    rate = abs(expected_rate(lengths, spread))
    steps: float = min(most, max(least, log(1 + DRIFT) / rate)) if rate > 0 else most
    return steps if steps_left is None else min(steps, steps_left)


def expected_change(lengths: Sequence[float], steps: float, spread: float) -> float:
    """The factor by which trajectories will be longer, so many steps after the newest of these.

    What grows is taken to grow by as much every step, and what shrinks by the same share. At most
    ``FURTHEST``, either way.
    """
    rate = expected_rate(lengths, spread)
    if not rate:  # and steps without end
        return 1.0
    change = steps * rate
    return min(FURTHEST, 1 + change) if change > 0 else max(1 / FURTHEST, exp(change))


def expected_rate(lengths: Sequence[float], spread: float) -> float:
    """The change of the mean length a step, as a share of it, that is expected to go on.

    The slope of the line (least squares) through the last ``RECENT`` of them if they grow, and
    through their logarithms if they shrink, as far as it is more than chance. It is ``USUAL`` or so
    in a run, so of one with the standard error s the share ``USUAL``^2 / (``USUAL``^2 + s^2) is
    expected.
    """
    recent = [max(length, 1.0) for length in lengths[-RECENT:]]
    if len(recent) < 2:
        return 0.0
    slope, squared_error = _line([log(length) for length in recent], spread)
    if slope > 0:
        mean = fmean(recent)
        slope, squared_error = _line([length / mean for length in recent], spread)
        slope = max(0.0, slope)
        slope /= 1 + slope * (len(recent) - 1) / 2
    return slope * USUAL**2 / (USUAL**2 + squared_error)


def _line(values: Sequence[float], spread: float) -> tuple[float, float]:
    """Return the slope of the line through evenly spaced values, and its squared standard error.

    How far they are off the line says the error, beside two that are as far off as ``spread`` says.
    Neighbours are alike, for what is too long for a batch is left to the next ones: half count.
    """
    number, mean = len(values), fmean(values)
    places = [place - (number - 1) / 2 for place in range(number)]
    squares = sum(place**2 for place in places)
    slope = sum(map(mul, places, values)) / squares
    off = sum((value - mean - slope * at) ** 2 for at, value in zip(places, values, strict=True))
    return slope, 2 * (off + 2 * spread**2) / number / squares


def drifted(before: Tokens | float, now: Tokens | float) -> bool:
    """Whether a plan for the one mean length is stale for the other."""
    return abs(log(max(now, 1.0) / max(before, 1.0))) > log(1 + DRIFT)
