"""A checksum of a tensor that can be computed where the tensor is, and in parts.

Of a tensor of ``R`` rows (its first dimension) and ``C`` columns (the others), whose elements have
the bits ``b[i, j]``, read as signed integers::

    checksum = sum over i, j of row[i] * column[j] * b[i, j]      modulo 2**64

``row`` and ``column`` are fixed pseudo-random 64-bit numbers (SplitMix64; Steele, Lea & Flood,
OOPSLA 2014). It is a sum, so the checksums of the parts that the ranks of a server hold add up to
the checksum of the tensor, and a GPU computes it at the speed of its memory without a copy to the
host.

If it differs, the tensors differ. Two different tensors have the same one with a probability below
``2**-43`` in 16-bit formats and ``2**-27`` in float32, over the choice of ``row`` and ``column``:
with a difference that ``2**v`` divides (``v <= 15``, or 31), the sum over a row has a random value
above its lowest ``v`` bits, and the sum over the rows as well, which leaves ``(64 - v) /
2**(65 - v)``. It protects against accidents, not against forgery.

Numbers that a kernel may flush to zero count as zero: subnormals in float32 and bfloat16, and the
sign of zero.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

MODULUS = 2**64
BLOCKS = {"cpu": 2**15}
"""Elements summed at a time: of these torch starts no threads of its own, whose number is the
trainer's; elsewhere ``BLOCK``."""
BLOCK = 2**24
"""Elements summed at a time on an accelerator, which take about 300 MB of its memory."""
_INTEGER = {2: torch.int16, 4: torch.int32}
_NOT_ZERO = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7FFF}
"""Bits of which one is set in every number that counts: the exponent's, or all but the sign."""
FORMATS = tuple(_NOT_ZERO)
"""Number formats that a checksum can be made of."""
_COLUMNS = 2**63
"""Where the numbers of the columns begin in the sequence; those of the rows begin at 0."""


def as_rows(tensor: Tensor) -> Tensor:
    """View a tensor as rows and columns; one of one dimension has one row."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)


def described(tensor: Tensor, known: int | None = None) -> dict[str, Any]:
    """What a manifest says of a tensor's numbers; ``known`` is its checksum, if it is known."""
    value = checksum(tensor) if known is None else known % MODULUS
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "checksum": f"{value:016x}",
    }


def checksum(tensor: Tensor, row: int = 0, column: int = 0) -> int:
    """Sum up a tensor, or the part of one that begins at this row and column of the whole."""
    return int(checksum_of(as_rows(tensor), row, column).item()) % MODULUS


def checksum_of(part: Tensor, row: int, column: int) -> Tensor:
    """Sum up rows and columns without waiting for the device: one int64 on the tensor's device."""
    part, mask = part.detach(), _NOT_ZERO[part.dtype]
    rows, columns = part.shape
    across = _numbers(_COLUMNS + column, columns, part.device)
    down = _numbers(row, rows, part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    block = BLOCKS.get(part.device.type, BLOCK)
    width = max(1, min(columns, block))
    height = max(1, min(rows, block // width))
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            bits = part[top : top + height, left : left + width].contiguous()
            bits = bits.view(_INTEGER[bits.element_size()])
            bits = torch.where((bits & mask) != 0, bits, 0).to(torch.int64)
            sums = bits.mul_(across[left : left + width]).sum(1)
            total += sums.mul_(down[top : top + height]).sum()
    return total


@lru_cache(maxsize=64)
def _numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Return numbers ``first`` and those after it of SplitMix64's sequence, as int64."""
    index = np.arange(count, dtype=np.uint64) + np.uint64(first + 1)
    mixed = index * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy(mixed.view(np.int64)).to(device)
