"""The copy of a version in a rank's memory, from which it is written behind the steps.

Buffers are in the format of publication and kept for the next version; on an accelerator they are
page-locked, and numbers are cast and summed up there, before the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from libra_cli.node.weights.tensor_rows import RowsKey, TensorRows


class StagedRows:
    """Pieces of tensors, each in a buffer of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[RowsKey, Tensor] = {}
        self.pieces: Sequence[TensorRows] = ()
        """The pieces that ``copy`` copied last, each with its buffer."""

    def copy(self, pieces: Iterable[TensorRows]) -> dict[RowsKey, int]:
        """Copy them into the buffers; return the checksums of those on an accelerator."""
        sums: dict[RowsKey, Tensor] = {}
        devices, copied = set(), list[TensorRows]()
        for piece in pieces:
            if piece.tensor.device.type != "cpu":
                piece = replace(piece, tensor=piece.tensor.to(self._dtype))
                sums[piece.key] = piece.checksum()
                devices.add(piece.tensor.device)
            buffer = self._buffer(piece.key, piece.tensor)
            buffer.copy_(piece.tensor, non_blocking=True)
            copied.append(replace(piece, tensor=buffer))
        for device in devices:
            torch.accelerator.synchronize(device)
        self.pieces = copied
        return {key: int(value.item()) for key, value in sums.items()}

    def _buffer(self, key: RowsKey, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            locked = tensor.device.type != "cpu"
            buffer = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=locked)
            self._buffers[key] = buffer
        return buffer
