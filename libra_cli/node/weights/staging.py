"""The copy of a version in a rank's memory, from which it is written behind the steps.

Buffers are in the format of publication and kept for the next version; on an accelerator they are
page-locked, and numbers are cast and summed up there, before the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from libra_cli.node.weights.checksum import as_rows, checksum_of


class StagedTensors:
    """Tensors by name, each in a buffer of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The buffers by tensor name, as the last ``copy`` left them."""
        return self._buffers

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Copy them into the buffers; return the checksums of those on an accelerator."""
        sums: dict[str, Tensor] = {}
        devices = set()
        for name, tensor in tensors:
            if tensor.device.type != "cpu":
                tensor = tensor.to(self._dtype)
                sums[name] = checksum_of(as_rows(tensor), 0, 0)
                devices.add(tensor.device)
            self._buffer(name, tensor).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return {name: int(value.item()) for name, value in sums.items()}

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            locked = tensor.device.type != "cpu"
            buffer = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=locked)
            self._buffers[name] = buffer
        return buffer
