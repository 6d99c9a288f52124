"""Context parallelism: the tokens of one packed row are split over neighbouring ranks.

Every layer but attention treats each token by itself, so a rank runs it on its own tokens. For
attention the ranks exchange tokens for heads and back (Ulysses, arXiv 2309.14509): each then
attends to whole sequences with its share of the heads, by whatever kernel attends on one rank. The
heads must be a multiple of the ranks; key and value heads that are not are repeated until they are.

The scores of all ranks' tokens are gathered, and every rank computes the loss of the whole row, so
that a loss may compare any of its tokens. Each rank goes back from its own scores alone: the sum
of the ranks' gradients is that of the row.

Ring attention would need no multiple of heads. torch's (``torch.distributed.tensor.experimental``)
knows neither packed sequences nor CPUs, and accelerate's two choices are that and DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_to_all_single
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that compute one row together, in the order of their tokens."""

    group: dist.ProcessGroup
    rank: int
    """The place of this process among them, from 0 on."""
    size: int

    def padding(self, tokens: int) -> int:
        """How many tokens a row of so many lacks to be cut into equal parts."""
        return -tokens % self.size

    def span(self, tokens: int) -> tuple[int, int]:
        """``[start, stop)`` of this rank's tokens in a row that can be cut into equal parts."""
        part = tokens // self.size
        return self.rank * part, (self.rank + 1) * part

    def counts(self, places: Tensor, tokens: int) -> list[int]:
        """How many of the places ``[N]``, in ascending order, are on each rank."""
        part = tokens // self.size
        edges = torch.arange(part, tokens, part, device=places.device)
        cuts: list[int] = torch.searchsorted(places.contiguous(), edges).tolist()
        ends = [*cuts, len(places)]
        return [end - start for start, end in zip([0, *cuts], ends, strict=True)]

    def gather(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """*Collective.* The rows of all ranks, ``[sum of counts, ...]``; ``own`` are this one's.

        The gradient of a rank's own rows goes back to it, that of the others' rows to nobody.
        """
        most, start = max(counts), sum(counts[: self.rank])
        if not most:
            return own
        missing = most - len(own)
        given = pad(own.detach(), [0, 0] * (own.ndim - 1) + [0, missing])
        parts = all_gather_tensor(given.contiguous(), 0, self.group).split(most)
        whole = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
        here = torch.arange(start, start + len(own), device=own.device)
        return whole.index_copy(0, here, own)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """*Collective.* ``[1, heads, tokens of this rank, width]`` becomes
        ``[1, heads of this rank, all tokens, width]``."""
        times = self.size // gcd(self.size, key.shape[1])
        key, value = (
            tensor.repeat_interleave(times, 1) if times > 1 else tensor for tensor in (key, value)
        )
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def _to_heads(self, tensor: Tensor) -> Tensor:
        _, heads, tokens, width = tensor.shape
        parts = tensor.reshape(self.size, heads // self.size, tokens, width)
        return self._exchange(parts).transpose(0, 1).flatten(1, 2)[None]

    def to_tokens(self, output: Tensor) -> Tensor:
        """*Collective.* ``[1, all tokens, heads of this rank, width]`` becomes
        ``[1, tokens of this rank, heads, width]``."""
        _, tokens, heads, width = output.shape
        parts = output.reshape(self.size, tokens // self.size, heads, width)
        return self._exchange(parts).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, parts: Tensor) -> Tensor:
        """Give part i to rank i and get one of each; its gradient goes the way back."""
        exchanged: Tensor = all_to_all_single(parts.contiguous(), None, None, self.group)
        return exchanged


def context_group(device: torch.device, size: int) -> ContextGroup | None:
    """*Collective.* This rank's group of ``size`` neighbours; None where a rank has rows alone."""
    if size == 1:
        return None
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "cp")
    )
    return ContextGroup(mesh["cp"].get_group(), mesh["cp"].get_local_rank(), size)
