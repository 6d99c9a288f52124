"""Estimators whose advantages have mean 0 and variance 1 over the generated tokens of a batch.

    reinforce++             R_i, normalised
    reinforce++-baseline    R_i - mean of its group, normalised

REINFORCE++, arXiv 2501.03262. Mean and variance (n - 1) are over tokens, each with the advantage of
its trajectory, and 1e-8 is added to the variance: verl's ``masked_whiten``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import mean_of

VARIANCE_FLOOR = 1e-8
"""Added to the variance before the root is taken, as in verl's ``masked_whiten``."""


def reinforce_plus_plus(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The reward, compared with that of all tokens of the batch."""
    return _normalised(groups, [[one.reward for one in group.members] for group in groups])


def reinforce_plus_plus_baseline(
    groups: Sequence[ComparedGroup], training: TrainingSpec
) -> Estimate:
    """The reward less the mean of the group, compared with that of all tokens of the batch."""
    values = []
    for group in groups:
        mean = mean_of([one.reward for one in group.compared])
        values.append([one.reward - mean for one in group.members])
    return _normalised(groups, values)


def _normalised(groups: Sequence[ComparedGroup], values: list[list[float]]) -> Estimate:
    weights = [float(one.generated) for group in groups for one in group.members]
    flat, tokens = [value for row in values for value in row], sum(weights)
    if tokens < 2:
        return [[(0.0,) for _ in row] for row in values]
    mean = mean_of(flat, weights)
    squares = sum(w * (v - mean) ** 2 for w, v in zip(weights, flat, strict=True))
    std = sqrt(squares / (tokens - 1) + VARIANCE_FLOOR)
    return [[((value - mean) / std,) for value in row] for row in values]
