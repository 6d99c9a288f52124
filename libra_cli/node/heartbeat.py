"""What a rank tells of its progress, in a file of its host that the controller reads.

Every rank has a record of fixed size, one after the other by its place on the host. A thread counts
``beat`` up as long as the process runs at all; ``count`` grows and ``phase`` changes as the rank
goes on with its work. So a process that is stopped can be told from one that waits for another, and
both from one that computes for long. A record is JSON, padded with spaces.

The file is mapped: writing to it needs no disk, which may be full. Standard library only.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

RECORD_BYTES = 256
BEAT_S = 2.0
PHASE_CHARACTERS = 120


class Heartbeat:
    """The record of one rank. Without a file nothing is told."""

    def __init__(self, path: Path | None = None, *, rank: int = 0, incarnation: int = 0) -> None:
        """``path`` is the host's file; it is made if it is not there."""
        self._rank = rank
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._beat = self._count = 0
        self._phase = "starting"
        self._map: mmap.mmap | None = None
        self._start = RECORD_BYTES * int(os.environ.get("LOCAL_RANK", "0"))
        if path is not None:
            with suppress(OSError):  # a rank that tells nothing is only not watched
                self._map = _mapped(path, self._start + RECORD_BYTES)
        self._tell()

    def start(self) -> None:
        """Beat for as long as the process lives."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def enter(self, phase: str) -> None:
        """Write that the rank goes on with ``phase``, of which ``PHASE_CHARACTERS`` are kept."""
        with self._lock:
            self._count += 1
            self._phase = phase.encode("ascii", "replace").decode()[:PHASE_CHARACTERS]
            self._tell()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_S):
            with self._lock:
                self._beat += 1
                self._tell()

    def _tell(self) -> None:
        if self._map is None:
            return
        record = json.dumps(
            {
                "rank": self._rank,
                "incarnation": self._incarnation,
                "beat": self._beat,
                "count": self._count,
                "phase": self._phase,
            }
        )
        self._map[self._start : self._start + RECORD_BYTES] = record.encode().ljust(RECORD_BYTES)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """The file from its beginning, made or grown to ``size`` bytes."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # never makes it shorter
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def beside(config: str) -> Path:
    """The file of the ranks that were started with this configuration."""
    return Path(config).with_suffix(".progress")
