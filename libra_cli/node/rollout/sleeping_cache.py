"""A KV cache that is given back to a host without GPUs while its server sleeps.

vLLM's sleep mode is an allocator of GPU memory. Without one, the memory of the tensors is given
back and taken again, and the tensors stay what they are: all that refers to them goes on to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from torch import Tensor


class SleepingCache:
    """Holds the tensors of a cache, which have no memory until ``wake``."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Give back the memory of the tensors, of which several may have the same."""
        self._tensors = list(tensors)
        storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        # What malloc took from among what was freed before, it keeps for the next that asks.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)

    def wake(self) -> None:
        """Take memory again; all numbers are 0 then, as in a new cache.

        Raises:
            RuntimeError: there is not enough.
        """
        for tensor, size in zip(self._tensors, self._bytes, strict=True):
            storage = tensor.untyped_storage()
            storage.resize_(max(size, storage.nbytes()))
        for tensor in self._tensors:
            tensor.zero_()
