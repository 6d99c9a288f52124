"""RLOO: each of n members is compared with the mean of the others (Ahmadian et al., 2402.14740).

    A_i = (R_i - mean of the others) / s

s is as with ``grpo``, and 1 by default, which is TRL's.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import divisors, less_the_mean


def rloo(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The reward less the mean of the others: n / (n - 1) times that less the mean of all."""
    scales = divisors(groups, training.scale_rewards or "none")
    return [
        less_the_mean(group, scale * _share_of_others(group))
        for group, scale in zip(groups, scales, strict=True)
    ]


def _share_of_others(group: ComparedGroup) -> float:
    """The others' share of a group: (n - 1) / n, or 1 if the member is none of it, or alone."""
    count = len(group.members)
    return 1.0 if group.before or count == 1 else (count - 1) / count
