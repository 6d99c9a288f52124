"""What a rank gives of a tensor to a version: all of it, or the rows that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from libra_cli.node.weights.checksum import as_rows, checksum_of

RowsKey: TypeAlias = tuple[str, int]
"""A tensor's name, and the first of its rows that are meant."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """A tensor, or consecutive rows of one; of one dimension every number is a row."""

    name: str
    """The tensor's name in the model's files."""
    tensor: Tensor
    """The numbers, ``[rows, ...]``; there may be no row."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    first: int | None = None
    """The first row in the whole tensor; None if it is all of it, which every rank has."""

    @property
    def key(self) -> RowsKey:
        """What tells it from the other rows of a version."""
        return self.name, self.first or 0

    @property
    def is_empty(self) -> bool:
        return not self.tensor.numel()

    def checksum(self) -> Tensor:
        """Sum it up where it is; the sums of all pieces of a tensor add up to the tensor's."""
        first = self.first or 0
        row, column = (first, 0) if len(self.shape) > 1 else (0, first)
        return checksum_of(as_rows(self.tensor), row, column)


def whole(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[TensorRows]:
    """Yield tensors as pieces that are all of them."""
    for name, tensor in tensors:
        yield TensorRows(name, tensor, tuple(tensor.shape))
