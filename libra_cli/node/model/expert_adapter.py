"""Low-rank adapters on the experts of a mixture, each expert's matrices with factors of their own.

transformers keeps the matrices of all experts of a layer in two tensors: ``gate_up_proj``
``[experts, 2 inner, hidden]``, two matrices one above the other, and ``down_proj``
``[experts, hidden, inner]``. An adapter of rank r has for each of the two, with m matrices in it::

    adapter.TENSOR.lora_A.weight    [experts, m r, in]
    adapter.TENSOR.lora_B.weight    [experts, out, r]

so every matrix of every expert has its own A ``[r, in]`` and B ``[out / m, r]``, and files call
them beside that matrix, as PEFT and vLLM read them. The products with A and B are grouped by
experts as those with the model's matrices are. PEFT's own adapter of such tensors
(``target_parameters``) makes whole matrices of all experts in every pass, with gradients of the
same size, and gives two matrices one A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from libra_cli.config.training import LoraSpec

TENSORS = {"gate_up_proj": 2, "down_proj": 1}
"""The tensors of a layer's experts, and how many matrices of an expert each has."""


def experts_in(model: nn.Module) -> Iterator[Any]:
    """The modules of a transformers model that hold the experts of a layer."""
    for part in model.modules():
        tensors = [getattr(part, name, None) for name in TENSORS]
        if all(isinstance(one, Tensor) and one.ndim == 3 for one in tensors):
            yield part


def can_adapt(experts: Any) -> bool:
    """Whether the experts' tensors lie as the module's docstring says (not those of gpt-oss)."""
    told = {"has_gate": True, "has_bias": False, "is_concatenated": True, "is_transposed": False}
    return all(getattr(experts, name, None) is wanted for name, wanted in told.items())


def adapt(experts: Any, spec: LoraSpec) -> None:
    """Give the experts of a layer an adapter in float32 that changes nothing yet."""
    experts.adapter = ExpertAdapter(experts, spec)
    experts.forward = MethodType(_forward, experts)


class ExpertAdapter(nn.Module):  # type: ignore[misc]  # torch is not followed
    """The factors of all experts of a layer."""

    def __init__(self, experts: Any, spec: LoraSpec) -> None:
        super().__init__()
        self.scaling = spec.alpha / spec.rank
        self.active = True
        """Whether the layer computes with it."""
        for name, matrices in TENSORS.items():
            tensor = getattr(experts, name)
            self.add_module(name, _Factors(tensor, spec.rank, matrices))

    def added(self, name: str, tokens: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What it adds to the product of the tensor of that name with ``tokens``.

        ``tokens`` ``[n, in]`` are sorted by their experts; ``ends`` int32 ``[experts]`` says where
        those of each end. Returns ``[n, out]``; None if it is not active.
        """
        if not self.active:
            return None
        factors: _Factors = getattr(self, name)
        return factors.product(tokens, ends, dtype) * self.scaling


class _Factors(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A and B of the matrices of one tensor."""

    def __init__(self, tensor: Tensor, rank: int, matrices: int) -> None:
        super().__init__()
        experts, rows, columns = tensor.shape
        self._matrices = matrices
        self.lora_A = _Factor((experts, matrices * rank, columns), tensor.device)
        self.lora_B = _Factor((experts, rows, rank), tensor.device)
        bound = 1 / math.sqrt(columns)  # PEFT's, of one matrix
        nn.init.uniform_(self.lora_A.weight, -bound, bound)

    def product(self, tokens: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        """B A of each token's expert."""
        a, b = (_local(one.weight).to(dtype) for one in (self.lora_A, self.lora_B))
        inner = _grouped(tokens.to(dtype), a, ends)
        parts = zip(inner.chunk(self._matrices, -1), b.chunk(self._matrices, 1), strict=True)
        return torch.cat([_grouped(part.contiguous(), rows, ends) for part, rows in parts], -1)


class _Factor(nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))


def _local(tensor: Tensor) -> Tensor:
    """This rank's experts, where ranks hold others (``expert_parallel``)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _grouped(tokens: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return nn.functional.grouped_mm(tokens, matrices.transpose(-2, -1), offs=ends)


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What the experts make of ``hidden_states`` ``[tokens, hidden]``, of which each meets the
    experts ``top_k_index`` ``[tokens, k]``, weighed by ``top_k_weights``."""
    chosen = top_k_index.shape[-1]
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0).to(torch.int32)

    def product(name: str, tokens: Tensor) -> Tensor:
        matrices = getattr(self, name)
        whole = _grouped(tokens.to(matrices.dtype), matrices, ends)
        added = self.adapter.added(name, tokens, ends, matrices.dtype)
        return whole if added is None else whole + added

    inner = self._apply_gate(product("gate_up_proj", hidden_states[order // chosen]))
    weighed = product("down_proj", inner) * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighed[back].unflatten(0, (-1, chosen)).sum(1).to(hidden_states.dtype)
