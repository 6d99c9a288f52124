"""The files of a version as its manifest lists them: in chunks, each with digests of its own.

A host checks a chunk as soon as it has come, and passes it on before it has the rest of the file.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.errors import NONSENSE
from libra_cli.node.weights.digests import ALGORITHMS, digest_of, quickest

CHUNK_BYTES = 2 * 1024**2
"""Bytes of every chunk of a file but the last. Hosts have nothing to pass on before the first ones
have come, which takes the longer the larger they are; every chunk costs a request."""
DELTA = ".delta"
"""Suffix of a delta's name, after the name of the file that it rebuilds."""
MANIFEST = "manifest.json"
VERSION = re.compile(r"v\d+-e\d+")
"""The names of the directories of versions; others lie beside them."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class ManifestError(ValueError):
    """A manifest is damaged, or names a file that it must not."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file's size in bytes, and the digest of each of its chunks in hexadecimal."""

    bytes: int
    digests: tuple[str, ...]
    algorithm: str
    """The digests' algorithm, a key of ``digests.ALGORITHMS``."""

    def span(self, index: int) -> tuple[int, int]:
        """Where a chunk begins in the file, and its size in bytes."""
        offset = index * CHUNK_BYTES
        return offset, min(CHUNK_BYTES, self.bytes - offset)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a host must know of a version to fetch it."""

    files: Mapping[str, ListedFile]
    base: str
    """The version of which deltas make this one; empty if there are none."""
    deltas: Mapping[str, ListedFile]


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of the bytes: of the last that a disk has room for, one write takes a part.

    Raises:
        OSError: they cannot be written.
    """
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def chunks_of(size: int) -> int:
    """The number of chunks of so many bytes."""
    return -(-size // CHUNK_BYTES)


def listed(path: Path, algorithm: str) -> ListedFile:
    """Read a file and describe it by one algorithm."""
    return listings(path, [algorithm])[algorithm]


def listings(path: Path, algorithms: Collection[str] = ALGORITHMS) -> dict[str, ListedFile]:
    """Read a file once, and describe it by each algorithm."""
    size, buffer = 0, memoryview(bytearray(CHUNK_BYTES))
    digests: dict[str, list[str]] = {name: [] for name in algorithms}
    with path.open("rb", buffering=0) as file:
        while count := _fill(file, buffer):
            for name in algorithms:
                digests[name].append(digest_of(name, buffer[:count]))
            size += count
    return {name: ListedFile(size, tuple(found), name) for name, found in digests.items()}


def _fill(file: Any, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends; returns how much that was."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


def read_manifest(raw: bytes) -> Manifest:
    """Check a manifest that came from another host.

    Raises:
        ManifestError: it cannot be read, or names what is no plain file.
    """
    try:
        told = json.loads(raw)
        files, delta = _files(told["files"]), told.get("delta") or {"base": "", "files": {}}
        deltas, base = _files(delta["files"]), str(delta["base"])
    except NONSENSE as error:
        raise ManifestError(f"its {MANIFEST} is damaged") from error
    wrong = [name for name in files if not NAME.fullmatch(name) or name == MANIFEST]
    if told.get("delta") is not None:
        wrong += [] if NAME.fullmatch(base) else [base]
        wrong += {*deltas} ^ {file + DELTA for file in files}
    if wrong:
        raise ManifestError(f"its {MANIFEST} names {wrong[0]!r}, which is no plain file name")
    return Manifest(files, base, deltas)


def _files(told: Mapping[str, Mapping[str, Any]]) -> dict[str, ListedFile]:
    files = {name: _file(entry) for name, entry in told.items()}
    for one in files.values():
        if one.bytes < 0 or len(one.digests) != chunks_of(one.bytes):
            raise ValueError("a file does not have the chunks that its size asks for")
    return files


def _file(entry: Mapping[str, Any]) -> ListedFile:
    algorithm = quickest(entry)
    return ListedFile(int(entry["bytes"]), tuple(map(str, entry[algorithm])), algorithm)
