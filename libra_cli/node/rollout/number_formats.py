"""The number formats that servers hold weights in, and how a weight is rounded to them.

Of each row of a weight W, which is an output channel, a kernel multiplies by ``scale * q``::

    scale[i] = max over j of |W[i, j]| / largest        q[i, j] = nearest(W[i, j] / scale[i])

    format              q                                                      largest
    fp8_per_channel     float8 e4m3 (Micikevicius et al., arXiv 2209.05433)    448
    int8_per_channel    integers, rounded to even from halves                  127
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """What q is of, and what a row's scale follows from."""

    dtype: torch.dtype
    largest: float
    """The largest number of the format that is used."""
    least_scale: float
    """The least scale of a row: one of zeros has this."""

    def scales(self, largest: Tensor) -> Tensor:
        """Return the scales, in float32, of rows whose largest absolute values are given."""
        # A tensor as divisor, as in vLLM: a number becomes a product with its inverse.
        divisor = torch.tensor(self.largest, device=largest.device)
        return (largest.float() / divisor).clamp_min(self.least_scale)

    def nearest(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return q of a weight ``[rows, columns]`` by the scales ``[rows, 1]`` of its rows."""
        ratio = (weight / scale).clamp_(-self.largest, self.largest)
        return (ratio if self.dtype.is_floating_point else ratio.round_()).to(self.dtype)

    def rounded(self, weight: Tensor) -> Tensor:
        """Return the numbers ``[rows, columns]``, in float32, that a kernel multiplies by in place
        of whole rows of a weight."""
        scale = self.scales(weight.abs().amax(-1, keepdim=True))
        return self.nearest(weight, scale).float() * scale


FLOAT8 = NumberFormat(torch.float8_e4m3fn, 448.0, 1 / (448 * 512))
"""The least scale is vLLM's."""
INT8 = NumberFormat(torch.int8, 127.0, 1e-12)
"""The least scale is below that of any row that a model computes with."""


_VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")


def multiplies_int8() -> bool:
    """Return whether this CPU adds up products of int8 in 32 bits.

    An x86 without VNNI adds two of them in 16 bits, which overflow: of random matrices the products
    were 15 % off (AMD Milan, vLLM 0.32).
    """
    known = torch.cpu.get_capabilities()
    return known.get("architecture") != "x86_64" or any(known.get(one) for one in _VNNI)
