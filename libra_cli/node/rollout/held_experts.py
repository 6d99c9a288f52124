"""The experts of a mixture as a vLLM worker holds them: where in them published tensors are.

vLLM stacks the experts of a layer into two parameters: ``w13_weight`` ``[experts, 2 I, H]``, gate
above up, and ``w2_weight`` ``[experts, H, I]``. A tensor-parallel rank has a part of the I rows and
columns, an expert-parallel one some of the experts. Files have a matrix for each expert and
projection, or what all experts have in one tensor.

CPU kernels read the numbers of an expert in another order, and vLLM puts them into it only when a
process starts: a version that is loaded later lies in the files' order, and the kernels compute
something else of it. ``order_again`` puts that right. Which number goes where is found by ordering
the numbers of the places themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

READABLE = {"TRITON", "BATCHED_TRITON", "CPU"}
"""vLLM's kernels for experts that keep them in the order of the files, or whose order is known."""
Block: TypeAlias = tuple[int, int, Tensor]
"""Rows and columns of a published tensor: the first of each, and the numbers."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(module, RoutedExperts)


def blocks_of(path: str, layer: Any) -> Iterator[tuple[str, Iterator[Block]]]:
    """Yield name and blocks of all that the files may have of a layer's experts.

    ``path`` is the module's; names are beside it, for each expert and for all in one.
    """
    parent = path.rpartition(".")[0]
    gate, up, down = (
        layer.ckpt_gate_proj_name,
        layer.ckpt_up_proj_name,
        layer.ckpt_down_proj_name,
    )
    w13, w2 = in_order(layer, "w13_weight"), in_order(layer, "w2_weight")
    config = layer.moe_config
    rank = config.moe_parallel_config.tp_rank
    size = config.intermediate_size_per_partition_unpadded
    width = config.hidden_dim_unpadded
    first = rank * size
    second = w13.shape[1] // 2
    for place, expert in _numbers_of(layer):
        one = f"{parent}.{expert}"
        yield f"{one}.{gate}.weight", iter([(first, 0, w13[place, :size, :width])])
        yield f"{one}.{up}.weight", iter([(first, 0, w13[place, second : second + size, :width])])
        yield f"{one}.{down}.weight", iter([(0, first, w2[place, :width, :size])])
    experts, total = _numbers_of(layer), size * config.moe_parallel_config.tp_size
    for begin, half in ((0, 0), (total, second)):
        name, column = f"{parent}.gate_up_proj", (begin + first) * width
        yield name, _all(experts, column, w13[:, half : half + size, :width])
    if total == size:
        yield f"{parent}.down_proj", _all(experts, 0, w2[:, :width, :size])


def _all(experts: list[tuple[int, int]], column: int, part: Tensor) -> Iterator[Block]:
    for place, expert in experts:
        yield expert, column, part[place].reshape(1, -1)


def _numbers_of(layer: Any) -> list[tuple[int, int]]:
    """Return (place, expert) for every expert that this rank holds."""
    if layer.expert_map is None:
        return [(expert, expert) for expert in range(layer.local_num_experts)]
    places = layer.expert_map.tolist()
    return [(place, expert) for expert, place in enumerate(places) if place >= 0]


def unreadable(layer: Any) -> str:
    """Why what a layer holds cannot be read; empty if it can."""
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    name = getattr(backend, "name", type(layer.quant_method).__name__)
    if name in READABLE:
        return ""
    return (
        f"vLLM's kernel {name} keeps experts in an order that cannot be read back; with "
        "rollout.vllm_args: [--moe-backend, triton] it can"
    )


def in_order(layer: Any, name: str) -> Tensor:
    """A parameter of a layer's experts ``[experts, rows, columns]`` in the files' order."""
    held: Tensor = getattr(layer, name).detach()
    isa = _order_of(layer)
    if not isa:
        return held
    whole = torch.empty_like(held)
    places = _places(held.shape[1], held.shape[2], held.dtype, isa)
    whole.flatten(1)[:, places] = held.flatten(1)
    return whole


def order_again(model: nn.Module) -> None:
    """Put experts that were just loaded into the order that CPU kernels read."""
    for layer in model.modules():
        if is_experts(layer) and (isa := _order_of(layer)):
            from vllm._custom_ops import cpu_prepack_moe_weight

            for parameter in (layer.w13_weight, layer.w2_weight):
                parameter.data.copy_(cpu_prepack_moe_weight(parameter.data.clone(), isa))


def _order_of(layer: Any) -> str:
    """The instructions that a CPU kernel orders its experts for; empty where none does."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = getattr(layer.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        return ""
    return str(experts.isa)


@lru_cache(maxsize=8)
def _places(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Where in the files' order each number is that the kernel's order has, ``[rows * columns]``.

    Places are ordered digit by digit, since a number of 16 bits holds only small ones exactly.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(rows * columns)
    places = torch.zeros_like(numbers)
    for shift in range(0, (rows * columns).bit_length(), 8):
        digit = ((numbers >> shift) & 255).to(dtype).view(1, rows, columns)
        places += cpu_prepack_moe_weight(digit, isa).flatten().to(torch.int64) << shift
    return places
