"""Estimators that compare a trajectory with the others of its group, with n members.

    grpo    A_i = (R_i - mean R) / s                  DeepSeekMath, arXiv 2402.03300
    rloo    A_i = (R_i - mean of the others) / s      Ahmadian et al., arXiv 2402.14740

s is what ``training.scale_rewards`` says, with 1e-4 added: the standard deviation of the group's
rewards, of the batch's, or 1. By default it is the group's with ``grpo`` and 1 with ``rloo``, which
are TRL's. A late member is compared with the mean of those that its group was closed with.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import divisors, mean_of


def grpo(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The reward less the mean of the group."""
    scales = divisors(groups, training.scale_rewards or "group")
    return [_compared(group, scale) for group, scale in zip(groups, scales, strict=True)]


def rloo(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The reward less the mean of the others: n / (n - 1) times that less the mean of all."""
    scales = divisors(groups, training.scale_rewards or "none")
    return [
        _compared(group, scale * _share_of_others(group))
        for group, scale in zip(groups, scales, strict=True)
    ]


def _compared(group: ComparedGroup, divisor: float) -> list[tuple[float, ...]]:
    mean = mean_of([one.reward for one in group.compared])
    return [((one.reward - mean) / divisor,) for one in group.members]


def _share_of_others(group: ComparedGroup) -> float:
    """Of those compared with: (n - 1) / n, or all where the member is none of them, or alone."""
    count = len(group.members)
    return 1.0 if group.before or count == 1 else (count - 1) / count
