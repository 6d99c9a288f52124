"""GRPO: a trajectory is compared with the mean of its group (DeepSeekMath, arXiv 2402.03300).

    A_i = (R_i - mean R) / s

s is what ``training.scale_rewards`` says, with 1e-4 added: the standard deviation of the group's
rewards, which is the default, of the batch's, or 1. A late member is compared with the mean of
those that its group was closed with.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import divisors, less_the_mean


def grpo(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The reward less the mean of the group."""
    scales = divisors(groups, training.scale_rewards or "group")
    return [less_the_mean(group, scale) for group, scale in zip(groups, scales, strict=True)]
