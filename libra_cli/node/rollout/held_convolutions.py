"""The causal convolutions of linear attention as a vLLM worker holds them on CPUs.

Its bfloat16 kernels read the ``[channels, width]`` numbers of a convolution in an order of their
own, which vLLM makes of what was loaded. They are read back from there, and not from the copy in
the files' order that vLLM keeps beside it: what computes is what is proved. Which number goes where
is found by ordering the numbers of the places themselves, as for experts (``held_experts``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

COPY = "_cpu_unpacked_conv_weight"
"""What vLLM calls its copy in the files' order; a layer that has none is in that order itself."""


def in_order(layer: nn.Module) -> Tensor:
    """Return a layer's weight in the files' order; of a convolution ``[channels, width]``."""
    held: Tensor = layer.weight.detach()
    copy: Any = getattr(layer, COPY, None)
    if copy is None:
        return held
    whole = torch.empty_like(copy)
    whole.flatten()[_places(*copy.shape, copy.dtype)] = held.flatten()
    return whole


@lru_cache(maxsize=8)
def _places(channels: int, width: int, dtype: torch.dtype) -> Tensor:
    """Where in the files' order each number is that the kernel's order has, digit by digit, since
    a number of 16 bits holds only small ones exactly."""
    from vllm._custom_ops import causal_conv1d_weight_pack

    numbers = torch.arange(channels * width)
    places = torch.zeros_like(numbers)
    for shift in range(0, (channels * width).bit_length(), 8):
        digit = ((numbers >> shift) & 255).to(dtype).view(channels, width)
        places += causal_conv1d_weight_pack(digit).flatten().to(torch.int64) << shift
    return places
