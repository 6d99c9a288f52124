"""Weights that a server holds in fewer bits than they are published in, and how they are proved.

A linear layer holds of every weight the nearest numbers of a format of 8 bits, in units of its
row's scale (``number_formats``), and a kernel multiplies by ``scale * q``. vLLM's loader makes them
of each version's tensors as it loads them: float8 by vLLM's online quantization, int8 by
``int8_linear``. Embeddings, output layers and norms stay as they are published.

**Proof.** The trainer's checksums are of W. So whoever loads a version checks every W by them,
rounds it by the formula above, and says what the numbers ``scale * q`` add up to, in float32; and
that is what the kernels' own numbers must add up to. A layer that was not loaded holds other ones,
unless the step between moved none of its weights by enough to be rounded otherwise. The formula is
written down here a second time: a vLLM that rounds otherwise is refused, not believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from libra_cli.node.rollout.held_experts import Block
from libra_cli.node.rollout.number_formats import FLOAT8, NumberFormat
from libra_cli.node.weights.checksum import MODULUS, checksum, described

BLOCK = 2**24
"""Numbers that are widened to float32 at a time, about 200 MB with what rounding takes."""


class ReadableMethod:
    """A way of libra's own to quantize layers, which knows where its kernel has their weights."""

    number_format: NumberFormat

    def unreadable(self, layer: Any) -> str:
        """Return why what a layer holds cannot be read; empty if it can."""
        raise NotImplementedError

    def blocks_of(self, layer: Any, held: slice) -> Iterator[Block]:
        """Yield what the function ``blocks_of`` does."""
        raise NotImplementedError


def format_of(module: nn.Module) -> NumberFormat | None:
    """Return the format to which vLLM quantizes a layer while it loads it; None if it does not."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    method = getattr(module, "quant_method", None)
    if isinstance(method, ReadableMethod):
        return method.number_format
    return FLOAT8 if isinstance(method, Fp8PtpcOnlineLinearMethod) else None


def unreadable(layer: Any) -> str:
    """Return why what a quantized layer holds cannot be read; empty if it can."""
    method: Any = getattr(layer, "quant_method", None)
    if isinstance(method, ReadableMethod):
        return method.unreadable(layer)
    if layer.weight.dtype == FLOAT8.dtype:
        return ""
    return (
        f"vLLM's kernel {type(method.fp8_linear).__name__} keeps weights in an order "
        "that cannot be read back: rollout.quantization needs GPUs that compute in FP8 (Ada, "
        "Hopper, Blackwell: compute capability 8.9 or above); leave it out on others"
    )


def blocks_of(layer: Any, held: slice) -> Iterator[Block]:
    """Yield the numbers that a layer's kernel multiplies by, in float32 and in blocks: for each the
    places of its first row, within ``held``, and column, and ``[rows, columns]``."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, ReadableMethod):
        yield from method.blocks_of(layer, held)
        return
    size = (layer.output_size_per_partition, layer.input_size_per_partition)
    # Kernels have it transposed, and some of them pad it.
    weight = layer.weight.detach().t()[: size[0], : size[1]][held]
    scale = layer.weight_scale.detach().reshape(-1, 1)[: size[0]][held]
    for first, end in _blocks(weight):
        yield first, 0, weight[first:end].float() * scale[first:end]


class QuantizedWeights:
    """The tensors of a version on their way to vLLM's loader, which quantizes some of them."""

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        expected: Mapping[str, Mapping[str, Any]],
        formats: Mapping[str, NumberFormat],
        device: torch.device,
    ) -> None:
        """``expected`` is what a manifest says of each tensor, and may grow while ``tensors`` are
        given; those named in ``formats`` are quantized. What they become is computed on
        ``device``."""
        self._tensors = tensors
        self._published = expected
        self._formats = formats
        self._device = device
        self._rounded: dict[str, dict[str, Any]] = {}
        self.wrong: list[str] = []
        """Tensors that are not the trainer's, as sentences."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            if name in self._formats:
                self._rounded[name] = self._expect(name, tensor)
            yield name, tensor
        missing = set(self._formats) - self._rounded.keys()
        self.wrong += [f"{name} is not in the version" for name in sorted(missing)]

    @property
    def expected(self) -> dict[str, Mapping[str, Any]]:
        """What the workers must hold, once all tensors were given: as a manifest says it."""
        return {**self._published, **self._rounded}

    def _expect(self, name: str, tensor: Tensor) -> dict[str, Any]:
        about = self._published[name]
        dtype = getattr(torch, about["dtype"])
        was = becomes = 0
        for first, end in _blocks(tensor):
            block = tensor[first:end].to(self._device, dtype)
            was += checksum(block, first)
            becomes += checksum(self._formats[name].rounded(block), first)
        if was % MODULUS != int(about["checksum"], 16):
            self.wrong.append(f"{name} is not the trainer's")
        return {**described(tensor, becomes), "dtype": "float32"}


def _blocks(matrix: Tensor) -> Iterator[tuple[int, int]]:
    """Yield where blocks of whole rows begin and end."""
    rows = max(1, BLOCK // max(1, matrix.shape[1]))
    for first in range(0, matrix.shape[0], rows):
        yield first, min(first + rows, matrix.shape[0])
