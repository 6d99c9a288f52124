"""A version on its way to a host: which chunks of its files are there, and right.

Only chunks that were checked are ever written, so whatever is there may be passed on to others, and
a later attempt goes on from there. Standard library only.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.weights.chunks import (
    CHUNK_BYTES,
    MANIFEST,
    ListedFile,
    Manifest,
    chunks_of,
    listed,
    write_at,
)

MISSING, COMING, HERE = b"012"
"""States of a chunk, as the digit that tells other hosts of it."""
READERS = 4
"""How many files are read at a time to be checked."""


class Draft:
    """The hidden directory that becomes a version's when all of it has come."""

    def __init__(self, directory: Path, raw: bytes, manifest: Manifest) -> None:
        """Make the directory, with the manifest as it came (``raw``) and nothing else."""
        self.directory = directory
        self.raw = raw
        self.manifest = manifest
        self.is_wanted = True
        """Whether the version is still wanted; if not, whoever fetches it must end."""
        self._lock = threading.Lock()
        self._states: dict[str, bytearray] = {}
        directory.mkdir(mode=0o700)
        (directory / MANIFEST).write_bytes(raw)

    def expect(self, files: Mapping[str, ListedFile]) -> None:
        """Make room for files whose chunks are going to come.

        Raises:
            AgentRefused: the disk has no room for what is still missing.
        """
        with self._lock:
            new = {name: one for name, one in files.items() if name not in self._states}
            for name, one in new.items():
                self._states[name] = bytearray([MISSING]) * len(one.digests)
                with (self.directory / name).open("wb") as file:
                    file.truncate(one.bytes)
        self._check_room(files)

    def _check_room(self, files: Mapping[str, ListedFile]) -> None:
        free, needed = self.free(), self.missing_bytes(files)
        if needed > free:
            raise AgentRefused(
                "disk",
                f"{self.directory.name} needs {needed} bytes more in "
                f"{self.directory.parent}, {free} are free",
            )

    def free(self) -> int:
        """Return the free bytes of the disk that the draft is on."""
        return shutil.disk_usage(self.directory).free

    def missing_bytes(self, files: Mapping[str, ListedFile]) -> int:
        """Bytes of these files that have not come."""
        return sum(
            one.span(index)[1]
            for name, one in files.items()
            for index, state in enumerate(self._states.get(name, bytes(len(one.digests))))
            if state != HERE
        )

    def missing(self, name: str) -> list[int]:
        """The chunks of a file that have not come."""
        with self._lock:
            return [index for index, state in enumerate(self._states[name]) if state != HERE]

    def coming(self, name: str, index: int, *, is_coming: bool) -> None:
        """Record that a chunk is being fetched, or no longer, unless it is here already."""
        with self._lock:
            if self._states[name][index] != HERE:
                self._states[name][index] = COMING if is_coming else MISSING

    def write(self, name: str, index: int, data: memoryview) -> bool:
        """Put a chunk that is right in its place; False if another was quicker.

        Raises:
            AgentRefused: the disk is full.
        """
        with self._lock:
            if self._states[name][index] == HERE:
                return False
        try:
            with (self.directory / name).open("r+b", buffering=0) as file:
                write_at(file.fileno(), data, index * CHUNK_BYTES)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise AgentRefused("disk", f"{self.directory.parent} is full") from error
            raise
        with self._lock:  # another may have written the same meanwhile
            was, self._states[name][index] = self._states[name][index], HERE
        return was != HERE

    def came(self, name: str, index: int) -> None:
        """Record that a chunk is in its place and right, which whoever wrote it has checked."""
        with self._lock:
            self._states[name][index] = HERE

    @property
    def is_begun(self) -> bool:
        """Whether any chunk has come."""
        return any(HERE in states for states in self._states.values())

    def states(self) -> dict[str, str]:
        """Return for every file a digit for each chunk: missing, on its way, or here."""
        with self._lock:
            return {name: states.decode() for name, states in self._states.items()}

    def holds(self, name: str, first: int, count: int) -> bool:
        """Whether these bytes of a file have come and are right."""
        with self._lock:
            states = self._states.get(name)
            if states is None:
                return False
            touched = states[first // CHUNK_BYTES : chunks_of(first + count)]
        return touched.count(HERE) == len(touched)

    def adopt(self, files: Mapping[str, ListedFile]) -> str:
        """Check files that were made here; returns the name of one that is wrong, or nothing."""
        with ThreadPoolExecutor(READERS) as threads:
            found = threads.map(
                lambda name: listed(self.directory / name, files[name].algorithm), files
            )
            for (name, one), there in zip(files.items(), found, strict=True):
                if one != there:
                    return name
        with self._lock:
            for name, one in files.items():
                self._states[name] = bytearray([HERE]) * len(one.digests)
        return ""

    def drop(self, files: Iterable[str]) -> None:
        """Remove these files of the draft, with all of their chunks."""
        with self._lock:
            for name in files:
                self._states.pop(name, None)
                (self.directory / name).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
