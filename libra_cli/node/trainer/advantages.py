"""How much better a trajectory was than the others of its group."""

from __future__ import annotations

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to a group's standard deviation; the value TRL uses."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Each reward less the mean of its group, optionally over the group's standard deviation.

    ``rewards`` and ``groups``, the number of each one's group, are of shape (trajectories,), and so
    is the result.
    """
    _, index = torch.unique(groups, return_inverse=True)
    advantages = torch.empty_like(rewards)
    for group in range(int(index.max()) + 1 if len(index) else 0):
        members = index == group
        centred = rewards[members] - rewards[members].mean()
        if normalize_std:
            centred = centred / (_std(rewards[members]) + STD_FLOOR)
        advantages[members] = centred
    return advantages


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())
