"""A global batch, cut into micro-batches by a token budget and dealt out to the ranks.

Trajectories are sorted by length, so that a micro-batch is padded only to its own longest. Every
rank gets the same number of micro-batches, because a sharded forward is a collective: where there
are too few, a rank repeats one with weight zero. What is summed over the ranks does not depend on
how the batch was cut, since the loss is a sum divided by the global token count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """One trajectory of the batch. Arrays have one entry a token."""

    group: int
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    loss_mask: np.ndarray[Any, np.dtype[np.int8]]
    reward: float
    fresh: bool

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def learned(self) -> int:
        """Tokens that the loss is about."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some trajectories, padded on the right. B trajectories of at most T tokens.

    ``target_BT`` marks the tokens the loss is about; token t is predicted from position t - 1.
    """

    ids_BT: Tensor
    attention_BT: Tensor
    target_BT: Tensor
    rollout_BT: Tensor
    advantage_BT: Tensor
    fresh_BT: Tensor
    weight: float


def unpack(trajectories: Sequence[dict[str, Any]]) -> list[Item]:
    """The wire form of a batch (``edge.trainer.pack_batch``) as arrays.

    Raises:
        ValueError: the arrays of a trajectory differ in length.
    """
    items = [
        Item(
            group=int(one["group"]),
            token_ids=np.frombuffer(one["token_ids"], dtype="<i4"),
            logprobs=np.frombuffer(one["logprobs"], dtype="<f4"),
            loss_mask=np.frombuffer(one["loss_mask"], dtype="i1"),
            reward=float(one["reward"]),
            fresh=bool(one["fresh"]),
        )
        for one in trajectories
    ]
    for item in items:
        if not len(item.token_ids) == len(item.logprobs) == len(item.loss_mask):
            raise ValueError(f"group {item.group}: token arrays of different lengths")
    return items


def cut(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in micro-batches of at most ``budget`` padded tokens each, longest first.

    A trajectory longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        # The first of a micro-batch is its longest.
        width = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def deal(
    batches: Sequence[list[int]], lengths: Sequence[int], world_size: int
) -> list[list[tuple[list[int], float]]]:
    """Per rank, its micro-batches with their weights (0 for a repeated one), equally many each.

    Biggest first, each to the rank that has least so far among those with room.
    """
    most = -(-len(batches) // world_size)
    loads = [0] * world_size
    hands: list[list[tuple[list[int], float]]] = [[] for _ in range(world_size)]
    cost = [len(batch) * lengths[batch[0]] for batch in batches]
    for index in sorted(range(len(batches)), key=lambda index: (-cost[index], index)):
        open_ranks = [rank for rank in range(world_size) if len(hands[rank]) < most]
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        hands[rank].append((batches[index], 1.0))
        loads[rank] += cost[index]
    smallest = batches[min(range(len(batches)), key=lambda index: (cost[index], index))]
    for hand in hands:
        hand += [(smallest, 0.0)] * (most - len(hand))
    return hands


def collate(
    items: Sequence[Item], advantages: Tensor, indices: Sequence[int], weight: float
) -> MicroBatch:
    """Pad the chosen trajectories to the longest of them."""
    width = max(len(items[index]) for index in indices)
    shape = (len(indices), width)
    ids, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    target, fresh = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    rollout, advantage = torch.zeros(shape), torch.zeros(shape)
    for row, index in enumerate(indices):
        item = items[index]
        length = len(item)
        ids[row, :length] = torch.from_numpy(item.token_ids.astype(np.int64))
        attention[row, :length] = 1
        target[row, :length] = torch.from_numpy(item.loss_mask.astype(bool))
        rollout[row, :length] = torch.from_numpy(item.logprobs.copy())
        advantage[row, :length] = advantages[index]
        fresh[row, :length] = item.fresh
    return MicroBatch(ids, attention, target, rollout, advantage, fresh, weight)
