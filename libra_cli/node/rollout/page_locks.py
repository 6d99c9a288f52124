"""Locks pages of a version's files in memory, so that a GPU copies from them directly.

From ordinary pages CUDA copies through a small buffer of its own, at 4 to 8 GB/s; from locked ones
the GPU reads by itself, at what the bus gives. Pages are locked where they are mapped, by
``cudaHostRegister``. They must be mapped as shared: safetensors maps files privately, and the
kernel locks such pages by making copies of them. Memory of ``/dev/shm`` can be locked, files of a
disk cannot; then, or where CUDA refuses for another reason, copies go as they went.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for every context of the process."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Number formats of versions, as safetensors calls them."""
Span: TypeAlias = tuple[int, int]
"""Where a piece of memory begins and ends: addresses."""

_log = logging.getLogger(__name__)


class PageLocks:
    """Locks and unlocks memory for one GPU. Once that is refused, it is not tried again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._refused = False

    def lock(self, spans: Iterable[Span]) -> list[Span]:
        """Lock the pages of these spans; return the pages that are locked. CUDA keeps an error for
        the thread that made it: call this in none that computes on a GPU."""
        locked = []
        with torch.cuda.device(self._device):  # else a new thread would open a context on GPU 0
            for begin, end in () if self._refused else pages_of(spans):
                error = torch.cuda.cudart().cudaHostRegister(begin, end - begin, PORTABLE)
                if int(error) != 0:
                    self._refused = True
                    _log.warning(
                        "versions are copied from ordinary pages: CUDA cannot lock theirs (%s)",
                        error,
                    )
                    break
                locked.append((begin, end))
        return locked

    def unlock(self, pages: Iterable[Span]) -> None:
        """Unlock what ``lock`` returned, while it is still mapped."""
        with torch.cuda.device(self._device):
            for begin, _ in pages:
                torch.cuda.cudart().cudaHostUnregister(begin)


@lru_cache
def locks_for(device: torch.device) -> PageLocks | None:
    """Return the locks for a device; None for one that is not CUDA's."""
    return PageLocks(device) if device.type == "cuda" else None


def pages_of(spans: Iterable[Span]) -> list[Span]:
    """Return the pages in which spans are, in order; those that touch are one. A page cannot be
    locked twice, and a copy must not go over the border of two pieces that were locked apart."""
    pages = list[Span]()
    for begin, end in sorted(spans):
        begin, end = begin // PAGESIZE * PAGESIZE, -(-end // PAGESIZE) * PAGESIZE
        if pages and begin <= pages[-1][1]:
            pages[-1] = (pages[-1][0], max(end, pages[-1][1]))
        else:
            pages.append((begin, end))
    return pages


def span_of(part: Tensor) -> Span | None:
    """Return where a part of a mapped tensor is; None if it is not in one piece, since it is then
    copied together by the CPU first."""
    begin = part.data_ptr()
    return (begin, begin + part.nbytes) if part.numel() and part.is_contiguous() else None


def shared_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Map a file of a version as shared memory; yields names and tensors, which are never written
    to."""
    whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    size = int.from_bytes(bytes(whole[:8].tolist()), "little")
    tensors: dict[str, dict[str, Any]] = json.loads(whole[8 : 8 + size].numpy().tobytes())
    tensors.pop("__metadata__", None)
    for name, about in tensors.items():
        begin, end = about["data_offsets"]
        numbers = whole[8 + size :][begin:end].view(_DTYPES[about["dtype"]])
        yield name, numbers.view(about["shape"])
