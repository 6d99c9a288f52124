"""Writes the files of a version: rows of tensors where they lie, then headers, digests, deltas."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from libra_cli.node.weights import patch
from libra_cli.node.weights.checksum import MODULUS
from libra_cli.node.weights.chunks import listings, write_at
from libra_cli.node.weights.layout import FileLayout, PlannedFile
from libra_cli.node.weights.tensor_rows import RowsKey, TensorRows

WRITERS = 4
"""Threads of a rank that write."""
DELTA_SHARE = 0.5
"""The largest delta, as a share of its file's size: rebuilding from a larger one would take a host
more time than the smaller transfer saves."""
DELTA_S = 1.0
log = logging.getLogger("libra.weights")


@dataclass(frozen=True, slots=True)
class FileOnDisk:
    """A file of a version, as the manifest lists it."""

    name: str
    bytes: int
    digests: Mapping[str, Sequence[str]]
    """Digests of its chunks in order, by algorithm."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of tensors, and its delta if it has one."""

    file: FileOnDisk
    delta: FileOnDisk | None


def write_rows(
    pieces: Iterable[TensorRows], directory: Path, layout: FileLayout, sums: Mapping[RowsKey, int]
) -> dict[str, int]:
    """Write pieces to where they lie in the files; return their checksums, by the tensor's name.

    Others may write to the same files meanwhile. ``sums`` are checksums that are known already.

    Raises:
        OSError: they cannot be written.
    """
    some = [piece for piece in pieces if not piece.is_empty]
    names = {layout.places[piece.name].file for piece in some}
    with _opened(directory, names) as files, ThreadPoolExecutor(WRITERS) as pool:
        found = pool.map(lambda one: _write_rows(one, files, layout, sums.get(one.key)), some)
        return added({one.name: value} for one, value in zip(some, found, strict=True))


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the checksums of parts of tensors, by the tensor's name."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total


@contextmanager
def _opened(directory: Path, names: Collection[str]) -> Iterator[dict[str, int]]:
    """Descriptors of files, by name; they are made if they are not there."""
    files: dict[str, int] = {}
    try:
        for name in names:
            files[name] = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _write_rows(
    piece: TensorRows, files: Mapping[str, int], layout: FileLayout, known: int | None
) -> int:
    place = layout.places[piece.name]
    offset = place.offset + (piece.first or 0) * place.row_bytes
    write_at(files[place.file], _bytes_of(piece.tensor), offset)
    return int(piece.checksum().item()) if known is None else known


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def finish_files(
    files: Sequence[PlannedFile], directory: Path, base: Path, rows_s: float
) -> list[WrittenFile]:
    """Give files whose rows are written their headers, digests, and deltas from ``base``.

    ``rows_s`` is how long the rows took: a delta may take as long as its file.

    Raises:
        OSError: they cannot be written, or are not whole.
    """
    each_s = rows_s * min(1.0, WRITERS / max(1, len(files)))
    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(partial(_finish, directory, base, each_s), files))


def _finish(directory: Path, base: Path, rows_s: float, planned: PlannedFile) -> WrittenFile:
    path, started = directory / planned.name, time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        write_at(descriptor, memoryview(planned.head), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    file = on_disk(path)
    if file.bytes != planned.bytes:
        raise OSError(f"{path} has {file.bytes} bytes of {planned.bytes}")
    within_s = max(DELTA_S, rows_s + time.monotonic() - started)
    return WrittenFile(file, _delta(base / path.name, path, planned.word_bytes, within_s))


def _delta(base: Path, path: Path, word_bytes: int, within_s: float) -> FileOnDisk | None:
    """Write a delta; None if it would be too large or cannot be written, since none is needed."""
    delta = path.with_name(path.name + patch.SUFFIX)
    limit = int(DELTA_SHARE * path.stat().st_size)
    try:
        if base.is_file() and patch.encode(
            base, path, delta, word_bytes=word_bytes, limit=limit, within_s=within_s
        ):
            return on_disk(delta)
    except OSError as error:  # a full disk, first of all
        log.warning("%s is published without a delta: %s", path, error)
    delta.unlink(missing_ok=True)
    return None


def on_disk(path: Path) -> FileOnDisk:
    """Wait until a file is on disk, and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    found = listings(path)
    size = path.stat().st_size
    return FileOnDisk(path.name, size, {name: one.digests for name, one in found.items()})


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
