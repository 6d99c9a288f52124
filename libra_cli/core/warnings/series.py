"""The numbers of the newest steps, and what can be said of their change.

Steps are noisy, and means over a few of them are what is compared: two windows differ where their
means do by more than ``CERTAIN`` standard errors of the difference (Welch). Neighbouring steps are
not independent, so this is far more than the 2 of a textbook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean, variance
from typing import TypeAlias

from libra_cli.core.records import StepRecord

Numbers: TypeAlias = Mapping[str, float]
"""The known numbers of one step, by name."""
FIRST_GAP = "first_logprob_gap"
"""The name of the mean gap of a run's first steps, which each later step has beside its own."""
CERTAIN = 4.0
"""Standard errors; what healthy runs were told at this bound is in ``rules``."""


@dataclass(frozen=True, slots=True)
class Change:
    """The means over a window of steps and over the one after it."""

    before: float
    after: float
    errors: float
    """The difference of the means over its standard error; above 0 where the number rose."""

    @property
    def rose(self) -> bool:
        """Whether the number rose by more than chance."""
        return self.errors > CERTAIN

    @property
    def fell(self) -> bool:
        """Whether the number fell by more than chance."""
        return self.errors < -CERTAIN


def numbers_of(step: StepRecord) -> dict[str, float]:
    """Return the known numbers of a step, by the names of
    ``StepRecord``, its batch and its trainer.
    """
    named: dict[str, float | None] = {"reward": step.reward, "mean_length": step.mean_length}
    named["logprob_gap"] = step.logprob_gap
    named |= step.batch | step.metrics
    return {name: value for name, value in named.items() if value is not None and isfinite(value)}


def newest(series: Sequence[Numbers], name: str, steps: int) -> list[float]:
    """The number at each of the newest ``steps``; none at all if one of them does not have it."""
    values = [numbers[name] for numbers in series[-steps:] if name in numbers]
    return values if len(values) == steps else []


def change(series: Sequence[Numbers], name: str, steps: int) -> Change | None:
    """Return the change from one window of ``steps`` steps to the
    newest; None if a step lacks the number.
    """
    values = newest(series, name, 2 * steps)
    if not values:
        return None
    before, after = values[:steps], values[steps:]
    error = sqrt((variance(before) + variance(after)) / steps)
    difference = fmean(after) - fmean(before)
    certain = inf if difference > 0 else -inf if difference < 0 else 0.0
    return Change(fmean(before), fmean(after), difference / error if error else certain)
