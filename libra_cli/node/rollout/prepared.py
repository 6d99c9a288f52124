"""Brings what a worker needs of a version into its memory while the server goes on generating.

A thread maps the files and reads one byte of every page that the worker is going to copy from: of a
tensor-parallel rank only the rows or columns that it holds. What is on a disk is read then, what is
in the page cache or in /dev/shm is mapped, and nothing is copied: vLLM's loaders take their slices
from these tensors when generation stands still. For a GPU pages are locked too (``page_locks``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from libra_cli.node.rollout.page_locks import PageLocks, Span, shared_tensors, span_of
from libra_cli.node.weights.checksum import as_rows

PAGE_BYTES = 4096
"""Bytes of the smallest page there is; huge pages are read a few times over."""
Region: TypeAlias = tuple[slice, slice]
"""Rows and columns of a published tensor; one of one dimension has one row."""


class PreparedVersion:
    """The tensors of a version's directory, mapped; a worker's own parts are in memory."""

    def __init__(
        self, directory: str, regions: Mapping[str, Region], locks: PageLocks | None = None
    ) -> None:
        """Begin. ``regions`` are the worker's own parts, by name; of other tensors it needs all.
        Their pages are locked with ``locks``, if there are any."""
        self.directory = directory
        self._regions = regions
        self._locks = locks
        self._locked: list[Span] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all is in memory, or has failed."""
        return not self._thread.is_alive()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait until all is in memory; yields names and whole tensors.

        Raises:
            Exception: a file cannot be read.
        """
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        yield from self._tensors

    def close(self) -> threading.Thread:
        """Unlock the pages once all is in memory: a thread does, which is returned."""
        thread = threading.Thread(target=self._unlock, name="unlock", daemon=True)
        thread.start()
        return thread

    def _unlock(self) -> None:
        self._thread.join()
        if self._locks is not None:
            self._locks.unlock(self._locked)
        self._tensors.clear()

    def _run(self) -> None:
        read = mapped_tensors if self._locks is None else shared_tensors
        try:
            for path in sorted(Path(self.directory).glob("*.safetensors")):
                found = list(read(path))
                parts = [part_of(tensor, self._region(name)) for name, tensor in found]
                for part in parts:
                    touch(part)
                self._tensors += found
                # Each file by itself, since files may be mapped side by side.
                if self._locks is not None:
                    self._locked += self._locks.lock(filter(None, map(span_of, parts)))
        except Exception as error:  # noqa: BLE001  raised where the tensors are wanted
            self._problem = error

    def _region(self, name: str) -> Region:
        return self._regions.get(name, (slice(None), slice(None)))


def mapped_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Map a file; yields names and tensors."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            yield name, file.get_tensor(name)


def part_of(tensor: Tensor, region: Region) -> Tensor:
    """Return rows and columns of a tensor."""
    return as_rows(tensor)[region]


def touch(part: Tensor) -> None:
    """Read every page of a part of a tensor, on the calling thread alone."""
    if not part.numel():
        return
    step = max(1, PAGE_BYTES // part.element_size())
    # As numbers of numpy, which starts no threads of its own.
    part.view(torch.uint8)[:, :: step * part.element_size()].numpy().sum()
