"""The socket pair between an agent and its guard, over which each tells the other the lease.

It is no file, so a full disk does not matter, and it ends with either process, so each learns of
the other's death at once. A message is one packet of JSON; whoever starts the other sends the first
one before, so the other knows the lease from its first moment. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from libra_cli.node.processes import proc
from libra_cli.node.processes.agent_log import open_log
from libra_cli.node.processes.proc import Marker, ProcessIdentity

BEAT_S = 1.0
"""Seconds between two messages of the agent to its guard, and of the guard to the agent."""
SILENCE_S = 30.0
"""After how long without a word the other counts as frozen, and is killed and replaced: far longer
than a disk that hangs blocks the agent, and far shorter than a lease."""
PACKET = 4096


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """What one tells the other: who speaks, and when the lease ends."""

    pid: int
    started: int
    """When the process ``pid``, which speaks, began, in clock ticks since boot."""
    deadline: float
    """When the lease ends, in seconds of the clock ``CLOCK_MONOTONIC`` of this boot."""
    lease_s: float

    @property
    def speaker(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started)


class LeaseLink:
    """One end of the pair. Nothing here blocks, and a dead end is no error."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        status = proc.status(os.getpid())
        assert status is not None, "this process runs"
        self._own = status.identity
        self.partner: ProcessIdentity | None = None
        self.heard_at = time.monotonic()
        self._looked_at = time.monotonic()

    def tell(self, deadline: float, lease_s: float) -> None:
        """Send the other process when the lease ends (``CLOCK_MONOTONIC``) and how long it is."""
        word = LeaseWord(self._own.pid, self._own.started, deadline, lease_s)
        with suppress(OSError):  # its buffer is full because it is frozen, or it is gone
            self.socket.send(json.dumps(asdict(word)).encode())

    def hear(self) -> tuple[list[LeaseWord], bool]:
        """What has come since, and whether the other end is still there."""
        words: list[LeaseWord] = []
        while True:
            try:
                packet = self.socket.recv(PACKET)
            except BlockingIOError:
                return words, True
            except OSError:
                return words, False
            if not packet:
                return words, False
            word = LeaseWord(**json.loads(packet))
            self.heard_at, self.partner = time.monotonic(), word.speaker
            words.append(word)

    def is_frozen(self) -> bool:
        """Whether the other end has been silent for too long; call it every ``BEAT_S``.

        A process that did not run itself meanwhile, on a machine that slept, waits anew.
        """
        now = time.monotonic()
        if now - self._looked_at > 5 * BEAT_S:
            self.heard_at = now
        self._looked_at = now
        return now - self.heard_at > SILENCE_S

    def close(self) -> None:
        self.socket.close()


def start_partner(
    arguments: Sequence[str], name: str, run_dir: Path, deadline: float, lease_s: float
) -> LeaseLink:
    """Start the agent or the guard of a run directory with the other end, and return this one.

    Raises:
        OSError: no process or descriptor is to be had.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        link = LeaseLink(ours)
        link.tell(deadline, lease_s)
        try:
            argv = [*arguments, str(run_dir), str(theirs.fileno())]
            started = start_ours(argv, name, run_dir, theirs)
        except OSError:
            link.close()
            raise
    if (status := proc.status(started.pid)) is not None:
        link.partner = status.identity
    return link


def start_ours(
    arguments: Sequence[str], name: str, run_dir: Path, passed: socket.socket | None = None
) -> subprocess.Popen[bytes]:
    """Start a module of ours that outlives this process and its terminal, with the run's marker."""
    log = open_log()
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            env={**os.environ, **Marker.of(run_dir).environment(name)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[passed.fileno()] if passed else [],
        )
    finally:
        os.close(log)
