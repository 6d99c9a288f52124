"""Linear layers that are quantized to int8 as vLLM loads them: --quantization int8_per_channel.

vLLM 0.32 has kernels for int8 weights with a scale for each output channel and int8 activations
with one for each token (``Int8ScaledMMLinearKernel``), for weights that a file has in int8. Its
online quantization makes int8 of experts alone. So the class that makes it of linear layers is
here, and is registered with vLLM in the process that builds its configuration; workers get it with
that.

What a kernel on a CPU multiplies by is in an order of its own, and vLLM keeps nothing else. It is
read back by products: a token of one number 127 and zeros is quantized to itself with scale 1, so
the product is ``127 * q * scale`` of one column, rounded to bfloat16. Divided by ``127 * scale`` it
is within a quarter of the integer q.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from libra_cli.node.rollout.held_experts import Block
from libra_cli.node.rollout.number_formats import INT8, multiplies_int8
from libra_cli.node.rollout.quantized_weights import ReadableMethod

NAME = "int8_per_channel"
IDENTITY_ROWS = 512
"""Columns of a weight that are read back at a time."""


_OVERFLOWS = (
    "this CPU has no VNNI instructions, without which oneDNN's products of int8 overflow, so that "
    "what it computes is not what was published: rollout.quantization: fp8_per_channel, or none"
)


class Int8LinearMethod(OnlineLinearBase, ReadableMethod):  # type: ignore[misc]
    """How a linear layer is quantized when its weight has come, and computed."""

    number_format = INT8
    activation_quant_key = None

    def create_weights(self, layer: Any, *sizes: Any, **named: Any) -> None:
        super().create_weights(layer, *sizes, **named)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = layer.weight
        split = layer.input_size != layer.input_size_per_partition
        largest = amax_for_tp_weight_quant(weight.abs().amax(-1, keepdim=True), split)
        scale = INT8.scales(largest)
        replace_parameter(layer, "weight", INT8.nearest(weight, scale))
        replace_parameter(layer, "weight_scale", scale)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        with set_default_torch_dtype(layer.orig_dtype):  # of the products
            self.kernel.process_weights_after_loading(layer)
        # oneDNN's handler has the address of these scales, and a reload moves them elsewhere.
        layer.scales_of_the_kernel = layer.weight_scale.data
        if layer.weight is None:  # it is in the handler, in another order
            nothing = torch.empty(0, dtype=torch.int8, device=scale.device)
            layer.weight = nn.Parameter(nothing, requires_grad=False)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = self.kernel.apply_weights(layer, x, bias)
        return product

    def unreadable(self, layer: Any) -> str:
        if current_platform.is_cpu():
            return "" if multiplies_int8() else _OVERFLOWS
        transposed = (layer.input_size_per_partition, layer.output_size_per_partition)
        if layer.weight.shape == transposed:
            return ""
        return (
            f"vLLM's kernel {type(self.kernel).__name__} keeps weights in an order that cannot be "
            "read back: rollout.quantization int8_per_channel needs its CUTLASS or Triton kernel; "
            "leave it out"
        )

    def blocks_of(self, layer: Any, held: slice) -> Iterator[Block]:
        rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
        scale = layer.weight_scale.detach().reshape(-1, 1)[:rows][held]
        for first in range(0, columns, IDENTITY_ROWS):
            end = min(first + IDENTITY_ROWS, columns)
            if current_platform.is_cpu():
                product = self._products(layer, first, end)[:, :rows].t()[held].float()
                yield 0, first, _told(product / INT8.largest, scale)
            else:
                yield 0, first, layer.weight[first:end, :rows].t()[held].float() * scale

    def _products(self, layer: Any, first: int, end: int) -> Tensor:
        """Return what the kernel makes of 127 in each of these columns, ``[columns, rows]``."""
        tokens = torch.zeros(end - first, layer.input_size_per_partition, dtype=layer.orig_dtype)
        tokens[torch.arange(end - first), torch.arange(first, end)] = INT8.largest
        product: Tensor = self.kernel.apply_weights(layer, tokens)
        return product


class Int8Config(QuantizationConfig):  # type: ignore[misc]
    """All linear layers are quantized; embeddings and output layers are not."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Int8LinearMethod | None:
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None


def register() -> None:
    """Let vLLM know the configuration, before it reads the argument --quantization."""
    register_quantization_config(NAME)(Int8Config)


def _told(product: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale * q`` where a product is that to the last bit of bfloat16, else the product:
    then the kernel has another scale than the layer."""
    whole = (product / scale).round() * scale
    return torch.where((whole - product).abs() <= product.abs() * 2**-8, whole, product)
