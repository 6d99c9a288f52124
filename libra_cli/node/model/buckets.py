"""Tensors in buckets, each of which one collective exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)


def in_buckets(tensors: Iterable[tuple[str, TensorT]], size: int) -> Iterator[dict[str, TensorT]]:
    """Cut a sequence of named tensors after every ``size`` bytes, at the ends of tensors."""
    bucket: dict[str, TensorT] = {}
    filled = 0
    for name, tensor in tensors:
        bucket[name] = tensor
        filled += tensor.nbytes
        if filled >= size:
            yield bucket
            bucket, filled = {}, 0
    if bucket:
        yield bucket
