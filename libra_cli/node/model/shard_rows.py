"""Brings the rows of sharded tensors to the ranks that write versions.

The first ranks of a replica write. Each other rank sends its rows to one of them, in the format of
publication: so rows go over the network once, to one rank, where a gather would give every row to
every rank, and no rank has a whole tensor. All ranks go through the tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from libra_cli.node.batch.shares import rows_of
from libra_cli.node.weights.tensor_rows import TensorRows


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Which of the ranks of the first replica this one is, and how many of them write."""

    rank: int
    shards: int
    writers: int
    dtype: torch.dtype
    """The format of publication."""

    def rows_of(self, name: str, tensor: DTensor) -> Iterator[TensorRows]:
        """*Collective in the first replica.* Yield the rows that this rank writes: its own, where
        they are, and those that others send; nothing if it does not write, after it has sent."""
        shape, local = tuple(tensor.shape), tensor.detach().to_local()
        if self.rank >= self.writers:
            if local.numel():
                rows = local.to(self.dtype).contiguous()
                _exchange(dist.isend, rows, self.rank % self.writers, tensor)
            return
        yield TensorRows(name, local, shape, self._span(shape, self.rank)[0])
        for sender in range(self.rank + self.writers, self.shards, self.writers):
            first, end = self._span(shape, sender)
            if end > first:
                rows = torch.empty((end - first, *shape[1:]), dtype=self.dtype, device=local.device)
                _exchange(dist.irecv, rows, sender, tensor)
                yield TensorRows(name, rows, shape, first)

    def _span(self, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
        return rows_of(shape[0], rank=rank, world=self.shards)


def _exchange(operation: Callable[..., object], rows: Tensor, peer: int, sharded: DTensor) -> None:
    """Send or receive rows, through the group that gathers the tensor's shards for a pass.

    In a batch, as NCCL would otherwise make a communicator for each pair of ranks.
    """
    mesh = sharded.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, rows, peer, group)]):
        work.wait()
