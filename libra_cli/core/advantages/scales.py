"""Means and standard deviations, exact where all values are the
same, and what rewards are divided by.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import sqrt
from statistics import fmean, stdev

from libra_cli.config.training import RewardScale
from libra_cli.core.advantages.protocol import ComparedGroup

STD_FLOOR = 1e-4
"""Added to a standard deviation of rewards; the value TRL uses."""


def mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the mean; of equal values exactly the value, so that rounding leaves no advantage."""
    return values[0] if min(values) == max(values) else fmean(values, weights)


def std_of(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample (n - 1), as TRL's; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0


def pooled_std(samples: Sequence[Sequence[float]]) -> float:
    """The standard deviation of several samples, each about its own mean, with n - 1 of all n
    values; 0 of one value.
    """
    count = sum(map(len, samples))
    if count < 2:
        return 0.0
    means = [mean_of(values) if values else 0.0 for values in samples]
    squares = [
        (value - mean) ** 2 for values, mean in zip(samples, means, strict=True) for value in values
    ]
    return sqrt(sum(squares) / (count - 1))


def divisors(groups: Sequence[ComparedGroup], scale: RewardScale) -> list[float]:
    """Return the divisor of each group's advantages by ``training.scale_rewards``, named as in TRL.

    The standard deviation is the whole group's, also for late members: that of the finished ones
    alone is often 0.
    """
    if scale == "none":
        return [1.0] * len(groups)
    rewards = [[one.reward for one in group.everyone] for group in groups]
    if scale == "group":
        return [std_of(values) + STD_FLOOR for values in rewards]
    own = [[one.reward for one in group.members] for group in groups]
    return [std_of(list(chain.from_iterable(own))) + STD_FLOOR] * len(groups)


def less_the_mean(group: ComparedGroup, divisor: float) -> list[tuple[float, ...]]:
    """Return each member's reward less the mean of the rewards it
    is compared with, over the divisor.
    """
    mean = mean_of([one.reward for one in group.compared])
    return [((one.reward - mean) / divisor,) for one in group.members]
