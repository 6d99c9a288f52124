"""Whether a plan is worth its moves: one law for a live run and for the simulator.

A plan is adopted only if ::

    gain per step x steps until the next expected drift  >  cost of the moves
    gain per step  >=  min_gain x today's step

The next drift is ``DRIFT`` (the change of mean length that makes a plan stale) over the rate at
which lengths have changed lately, within ``HORIZON``, and never beyond the end of the run.

Guarantee: no move without a predicted gain that pays it back. Limit: predictions, and only lengths
count as drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
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


def horizon(lengths: Sequence[float], steps_left: int | None) -> float:
    """Steps until the next expected drift, or the end; infinite where nothing has run yet.

    ``lengths`` are the mean generated tokens of a trajectory, one a step. The rate of change is
    that between the two halves of the last ``RECENT`` of them.
    """
    if not lengths and steps_left is None:
        return inf
    least, most = HORIZON
    rate = abs(_rate(lengths))
    steps: float = min(most, max(least, log(1 + DRIFT) / rate)) if rate > 0 else most
    return steps if steps_left is None else min(steps, steps_left)


def expected_change(lengths: Sequence[float], steps: float, spread: float) -> float:
    """The factor by which trajectories will be longer, so many steps after the newest of these.

    The rate goes on, as far as it is more than chance: of a rate r it is r^2 / (r^2 + s^2), where s
    is the rate's standard error (Stein's estimator). ``spread`` is the standard deviation of one
    step's mean length, as a share of it. What grows is taken to grow by as much every step, and
    what shrinks by the same share. At most ``FURTHEST``, either way.
    """
    half = len(lengths[-RECENT:]) // 2
    rate = _rate(lengths)
    if not rate:
        return 1.0
    error = spread * sqrt(2 / half) / half
    change = rate * steps * rate**2 / (rate**2 + error**2)
    return min(FURTHEST, 1 + change) if change > 0 else max(1 / FURTHEST, exp(change))


def _rate(lengths: Sequence[float]) -> float:
    """Return the change of the logarithm of the mean length a step; 0 where that is not known."""
    recent = lengths[-RECENT:]
    half = len(recent) // 2
    if not half:
        return 0.0
    old, new = fmean(recent[:half]), fmean(recent[-half:])
    return log(max(new, 1.0) / max(old, 1.0)) / (len(recent) - half)


def drifted(before: Tokens | float, now: Tokens | float) -> bool:
    """Whether a plan for the one mean length is stale for the other."""
    return abs(log(max(now, 1.0) / max(before, 1.0))) > log(1 + DRIFT)
