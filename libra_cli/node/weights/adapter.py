"""Low-rank adapters (LoRA, arXiv 2106.09685): what their tensors are called, and what they make.

Of a matrix W ``[out, in]``, published as ``LAYER.weight``, an adapter has::

    LAYER.lora_A.weight    A  [rank, in]
    LAYER.lora_B.weight    B  [out, rank]

and the matrix to compute with is W + scaling B A, scaling = alpha / rank. A version of a run that
trains an adapter has A and B only. Whoever needs the matrix makes it of its own copy of W, which is
the same on every host and in every version: so nothing adds up from version to version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Factors:
    """A ``[rank, in]`` and B ``[out, rank]``, with which an adapter changes one matrix."""

    a: Tensor
    b: Tensor

    def merged(self, weight: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
        """W + scaling B A: computed in float32 where ``weight`` is, and rounded once."""
        a, b = (one.to(weight.device, torch.float32) for one in (self.a, self.b))
        return torch.addmm(weight.float(), b, a, alpha=scaling).to(dtype)


def is_adapter(name: str) -> bool:
    """Whether a tensor of this published name is an adapter's."""
    return name.endswith((A, B))


def adapted(names: Iterable[str]) -> set[str]:
    """The published names of the matrices of whose adapters these are the tensors."""
    return {name.removesuffix(A) + ".weight" for name in names if name.endswith(A)}


def factors_of(weight: str, tensors: Mapping[str, Tensor]) -> Factors:
    """A and B of the matrix of this published name."""
    layer = weight.removesuffix(".weight")
    return Factors(tensors[layer + A], tensors[layer + B])
