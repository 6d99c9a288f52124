"""Splits the global batch over ranks and into padded micro-batches.

``deal`` gives each rank its share and cuts it: rows are sorted by length, so that a micro-batch of
``rows x longest`` padded tokens, at most the budget, has little padding. Every rank gets the same
number of micro-batches (empty ones if need be), because a sharded model's collectives run in every
forward pass. The sum over all ranks is the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra_cli.node.trainer.samples import TokenSample


def deal(lengths: Sequence[int], *, shares: int, budget: int) -> list[list[list[int]]]:
    """Return for each share its micro-batches, each a list of indices into ``lengths``.

    The longest sample goes first, each to the share with the fewest tokens so far; then each share
    is cut. ``lengths`` and ``budget`` are in tokens; a longer sample is a micro-batch by itself.
    """
    dealt: list[list[int]] = [[] for _ in range(shares)]
    tokens = [0] * shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        share = min(range(shares), key=lambda s: (tokens[s], s))
        dealt[share].append(index)
        tokens[share] += lengths[index]
    cuts = [_cut(indices, lengths, budget) for indices in dealt]
    most = max(map(len, cuts))
    return [cut + [[]] * (most - len(cut)) for cut in cuts]


def _cut(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a share; indices come longest first, so a micro-batch is as wide as its first row."""
    batches: list[list[int]] = []
    for index in indices:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded samples ``[B, T]``, and vectors ``[N]`` over their N generated tokens.

    Right padding needs no attention mask: under causal attention no real token sees it.
    """

    token_ids: Tensor
    """``[B, T]``, int64, padded with 0."""
    rows: Tensor
    """``[N]``: the row of each generated token."""
    columns: Tensor
    """``[N]``: the column of each generated token; the logits at ``columns - 1`` predict it."""
    rollout: Tensor
    """``[N]``: log-probabilities under the rollout policy, in nats."""
    advantages: Tensor
    """``[N]``: the advantage of the token's trajectory."""
    fresh: Tensor
    """``[N]``, bool: whether the trajectory is wholly of the trainer's current version."""
    ages: Tensor
    """``[N]``, int64: versions that the token is behind the trainer's."""

    @property
    def targets(self) -> Tensor:
        """The generated tokens ``[N]``."""
        return self.token_ids[self.rows, self.columns]


def collate(
    samples: Sequence[TokenSample], advantages: Sequence[float], device: torch.device
) -> MicroBatch:
    """Pad samples to a micro-batch; no samples become one row of two tokens without a loss."""
    longest = max((len(sample.token_ids) for sample in samples), default=2)
    token_ids: NDArray[np.int64] = np.zeros((max(1, len(samples)), longest), dtype=np.int64)
    mask: NDArray[np.bool_] = np.zeros(token_ids.shape, dtype=bool)
    rollout: NDArray[np.float32] = np.zeros(token_ids.shape, dtype=np.float32)
    ages: NDArray[np.int64] = np.zeros(token_ids.shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = sample.token_ids
        mask[row, :length] = sample.loss_mask != 0
        rollout[row, :length] = sample.logprobs
        ages[row, :length] = sample.ages()
    rows, columns = np.nonzero(mask)
    by_row = np.asarray(advantages, dtype=np.float32)
    fresh = np.asarray([sample.fresh for sample in samples], dtype=bool)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(columns).to(device),
        rollout=torch.from_numpy(rollout[rows, columns]).to(device),
        advantages=torch.from_numpy(by_row[rows]).to(device),
        fresh=torch.from_numpy(fresh[rows]).to(device),
        ages=torch.from_numpy(ages[rows, columns]).to(device),
    )
