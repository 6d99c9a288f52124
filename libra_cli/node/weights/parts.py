"""The parts of a version that several ranks of one host write, each of its own tensors.

    <root>/.v000007-e0.x1y2z3/              made by rank 0, renamed once all of it is there
      model-00000.safetensors ...           rank 0's
      model-01-00000.safetensors ...        those of writer 1, with their deltas
      part-01.json                          what the manifest is to say of them, or why there is
                                            nothing; it comes last, and goes before the renaming

Every tensor is gathered by all ranks, one after the other, and kept by one of them: the one that
has the least so far. So no rank's memory holds the model, and copying, hashing and comparing are
done side by side. A writer gives its part to whichever directory of its version lacks it: the first
one, and one that rank 0 makes later because the version was damaged.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from libra_cli.node.weights.staging import StagedTensors
from libra_cli.node.weights.versions import (
    FileOnDisk,
    WrittenFile,
    version_name,
    write_durably,
    write_tensors,
)

LOOK_S = 0.05
"""Seconds from one look for a directory that lacks a part, or for a part, to the next."""
PARTS_S = 600.0
"""How long rank 0 waits for the others' parts; a rank that died ends the trainer before."""
log = logging.getLogger("libra.weights")


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the ranks that write a version this one is; rank 0 is ``writer`` 0."""

    writer: int = 0
    writers: int = 1

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Go through all tensors, which every rank must, and yield those that are this one's."""
        taken = [0] * self.writers
        for name, tensor in tensors:
            owner = taken.index(min(taken))
            taken[owner] += tensor.numel()
            if owner == self.writer:
                yield name, tensor

    def others(self, directory: Path) -> list[WrittenFile]:
        """Wait for what the other ranks write into the directory of a version.

        Raises:
            OSError: a rank could not write its part, or did not within ``PARTS_S``.
        """
        deadline = time.monotonic() + PARTS_S
        found = [_await(directory, writer, deadline) for writer in range(1, self.writers)]
        return [one for part in found for one in part]


def _await(directory: Path, writer: int, deadline: float) -> list[WrittenFile]:
    path = directory / _part(writer)
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(f"writer {writer} gave no part of {directory.name} in {PARTS_S:.0f} s")
        time.sleep(LOOK_S)
    told: dict[str, Any] = json.loads(path.read_bytes())
    path.unlink()
    if told["problem"]:
        raise OSError(f"writer {writer}: {told['problem']}")
    return [
        WrittenFile(
            FileOnDisk(**one["file"]),
            FileOnDisk(**one["delta"]) if one["delta"] else None,
            one["tensors"],
        )
        for one in told["files"]
    ]


def _part(writer: int) -> str:
    return f"part-{writer:02d}.json"


class PartWriter:
    """A rank's part of every version, beside rank 0's ``Publisher``."""

    def __init__(
        self, root: Path, *, trainer_incarnation: int, dtype: torch.dtype, share: Share
    ) -> None:
        self._root = root
        self._incarnation = trainer_incarnation
        self._share = share
        self._staged = StagedTensors(dtype)
        self._version = -1
        self._sums: dict[str, int] = {}
        #: The directory that has this part of ``_version`` already.
        self._given: Path | None = None
        #: Held while the copy changes, and while it is written.
        self._copy = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="part-writer", daemon=True).start()

    def stage(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy this rank's part of a version; the tensors may change when this returns.

        Rank 0 must have settled (``Publisher.settled``): the copy of the version before goes.
        """
        with self._copy:
            self._sums = self._staged.copy(self._share.of(tensors))
            self._version, self._given = version, None

    def close(self) -> None:
        """Have the thread end that writes parts; it finishes the one that it is writing."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._copy:
                try:
                    if self._version >= 0:
                        self._look()
                except OSError as error:  # a file system that hangs or is away, for a while
                    log.warning("%s cannot be looked at: %s", self._root, error)

    def _look(self) -> None:
        name = version_name(self._version, self._incarnation)
        for directory in self._root.glob(f".{name}.*"):
            if directory != self._given:
                self._write(directory)
                self._given = directory

    def _write(self, directory: Path) -> None:
        told: dict[str, Any] = {"problem": "", "files": []}
        base = self._root / version_name(self._version - 1, self._incarnation)
        try:
            files = write_tensors(
                self._staged.tensors.items(),
                directory,
                base,
                self._sums,
                prefix=f"model-{self._share.writer:02d}",
            )
            told["files"] = [asdict(one) for one in files]
        except Exception as error:  # noqa: BLE001  rank 0 must hear of it, or would wait
            told["problem"] = f"{type(error).__name__}: {error}"
        draft = directory / f".{_part(self._share.writer)}"
        try:
            write_durably(draft, json.dumps(told).encode())
            draft.rename(directory / _part(self._share.writer))
        except OSError as error:  # rank 0 has given the directory up, or waits in vain
            log.warning("no part was given to %s: %s", directory, error)
