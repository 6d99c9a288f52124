"""Splits the global batch over ranks and into packed micro-batches.

``deal`` gives each rank its share and cuts it: a micro-batch is one row of whole trajectories, one
after the other and without padding, of at most the budget's tokens. Every rank gets the same number
of micro-batches (empty ones if need be), because a sharded model's collectives run in every forward
pass. The sum over all ranks is the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra_cli.node.model.packed_attention import PackedSequences
from libra_cli.node.model.scoring import ScoringRequest
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
    """Cut a share; indices come longest first, and each goes where it fits first."""
    batches: list[list[int]] = []
    tokens: list[int] = []
    for index in indices:
        length = lengths[index]
        for number, held in enumerate(tokens):
            if held + length <= budget:
                batches[number].append(index)
                tokens[number] += length
                break
        else:
            batches.append([index])
            tokens.append(length)
    return batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole trajectories in one row, and vectors ``[N]`` over their generated tokens."""

    request: ScoringRequest
    """The row, and the places of the generated tokens."""
    rows: Tensor
    """``[N]``: the number of each generated token's trajectory, from 0 on."""
    rollout: Tensor
    """``[N]``: log-probabilities under the rollout policy, in nats."""
    advantages: Tensor
    """``[N]``: the advantage of the token's trajectory."""
    fresh: Tensor
    """``[N]``, bool: whether the trajectory is wholly of the trainer's current version."""
    ages: Tensor
    """``[N]``, int64: versions that the token is behind the trainer's."""


def collate(
    samples: Sequence[TokenSample], advantages: Sequence[float], device: torch.device
) -> MicroBatch:
    """Put samples into one row; no samples become one of two tokens without a loss."""
    lengths = [len(sample.token_ids) for sample in samples] or [2]
    token_ids = _row([sample.token_ids for sample in samples], np.int64)
    mask = _row([sample.loss_mask for sample in samples], np.bool_)
    rollout = _row([sample.logprobs for sample in samples], np.float32)
    ages = _row([sample.ages() for sample in samples], np.int64)
    (places,) = np.nonzero(mask)
    rows = np.repeat(np.arange(len(lengths)), lengths)[places]
    by_row = np.asarray(advantages, dtype=np.float32)
    fresh = np.asarray([sample.fresh for sample in samples], dtype=bool)
    positions = np.concatenate([np.arange(length) for length in lengths])
    starts = np.cumsum([0, *lengths]).astype(np.int32)

    def here(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        request=ScoringRequest(
            token_ids=here(token_ids)[None],
            positions=here(positions)[None],
            packed=PackedSequences(tuple(lengths), here(starts)),
            places=here(places),
        ),
        rows=here(rows),
        rollout=here(rollout[places]),
        advantages=here(by_row[rows]),
        fresh=here(fresh[rows]),
        ages=here(ages[places]),
    )


def _row(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The parts one after the other; without any, two zeros."""
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(2, dtype=dtype)
