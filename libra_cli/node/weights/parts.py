"""What each of the ranks of one host writes of a version that they write together.

    <root>/.v000007-e0.x1y2z3/              made by rank 0, renamed once all of it is there
      model-00000.safetensors ...           each rank writes the rows that it holds to all of them
      rows-01.json                          writer 1 has written its rows, with their checksums
      files-01.json                         and what the manifest is to say of the files that it has
                                            finished, once all rows are there
      problem-01.json                       or why there is nothing

Nothing is gathered: rows of a shard are contiguous in a file, and checksums of parts add up. So no
rank's memory holds more than its part of the version, however large a tensor is. Only what every
rank has whole (tensors that are stacked or cut on their way to a file) is kept by one rank: the one
that has the least so far. Files are dealt out to be finished: headers, digests and deltas.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from libra_cli.node.weights.files import (
    FileOnDisk,
    WrittenFile,
    added,
    finish_files,
    write_durably,
    write_rows,
)
from libra_cli.node.weights.layout import FileLayout
from libra_cli.node.weights.tensor_rows import RowsKey, TensorRows

LOOK_S = 0.05
"""Seconds from one look for what another rank has told to the next."""
PARTS_S = 600.0
"""How long a rank waits for the others' parts; one that died ends the trainer before."""
ROWS, FILES, PROBLEM = "rows", "files", "problem"


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What was written: the files, and checksums modulo 2**64 by the tensor's name."""

    files: list[WrittenFile]
    sums: dict[str, int]


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the ranks that write a version this one is; rank 0 is ``writer`` 0."""

    writer: int = 0
    writers: int = 1

    def of(self, pieces: Iterable[TensorRows]) -> Iterator[TensorRows]:
        """Yield of every tensor what this rank writes: its own rows, or all or nothing of one that
        every rank has whole."""
        taken = [0] * self.writers
        for piece in pieces:
            owner = taken.index(min(taken))
            if piece.first is not None or owner == self.writer:
                yield piece
            else:
                yield replace(piece, tensor=piece.tensor.reshape(-1)[:0])
            if piece.first is None:
                taken[owner] += piece.tensor.numel()

    def write(
        self,
        pieces: Collection[TensorRows],
        layout: FileLayout,
        directory: Path,
        base: Path,
        sums: Mapping[RowsKey, int],
    ) -> WrittenPart:
        """Write this rank's part; on rank 0, wait for those of the others and return all.

        ``base`` is the directory of the version before, if it is there; ``sums`` are checksums of
        pieces that are known already.

        Raises:
            OSError: a rank could not write its part, or did not within ``PARTS_S``.
        """
        deadline, started = time.monotonic() + PARTS_S, time.monotonic()
        own = write_rows(pieces, directory, layout, sums)
        self._tell(directory, ROWS, own)
        rows = [self._await(directory, ROWS, other, deadline) for other in self._others]
        rows_s = time.monotonic() - started
        mine = layout.files[self.writer :: self.writers]
        files = finish_files(mine, directory, base, rows_s)
        self._tell(directory, FILES, [asdict(one) for one in files])
        if self.writer == 0:
            for other in self._others:
                files += map(_file, self._await(directory, FILES, other, deadline))
            for path in directory.glob("*.json"):
                path.unlink()
        return WrittenPart(files, added([own, *rows]))

    @property
    def _others(self) -> list[int]:
        return [number for number in range(self.writers) if number != self.writer]

    def tell_problem(self, directory: Path, problem: str) -> None:
        """Say why this rank gives nothing.

        Raises:
            OSError: not even that can be written.
        """
        self._tell(directory, PROBLEM, problem)

    def _tell(self, directory: Path, what: str, told: object) -> None:
        if self.writers > 1:
            name = f"{what}-{self.writer:02d}.json"
            draft = directory / f".{name}"
            write_durably(draft, json.dumps(told).encode())
            draft.rename(directory / name)

    def _await(self, directory: Path, what: str, writer: int, deadline: float) -> Any:
        path, problem = (directory / f"{name}-{writer:02d}.json" for name in (what, PROBLEM))
        while not path.exists():
            if problem.exists():
                raise OSError(f"writer {writer}: {json.loads(problem.read_bytes())}")
            if not directory.exists():
                raise OSError(f"{directory} was given up")
            if time.monotonic() > deadline:
                raise OSError(
                    f"writer {writer} gave no part of {directory.name} in {PARTS_S:.0f} s"
                )
            time.sleep(LOOK_S)
        return json.loads(path.read_bytes())


def _file(told: Mapping[str, Any]) -> WrittenFile:
    delta = FileOnDisk(**told["delta"]) if told["delta"] else None
    return WrittenFile(FileOnDisk(**told["file"]), delta)
