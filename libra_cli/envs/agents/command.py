"""One command in a process group of its own, whose output is read and which leaves nothing behind.

The group is ended when its leader has exited and before that is waited for: until then nobody else
can have the group's number, so no process of others is ever killed. A process that leaves the group
by itself (``setsid``) is not found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAST_WORDS = 2000
"""Bytes of the output that are kept."""
MOST_OUTPUT = 50 * 1024**2
"""Bytes that a command may print before it is ended."""
_CHUNK = 65536
_DRAIN_S = 1.0
"""How long output may come after everybody of the group is dead."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """The exit status of a command, and the end of its output."""

    code: int
    """The exit status, or a signal's number below 0."""
    words: str
    """The last ``LAST_WORDS`` bytes of its output as text, stripped."""
    flooded: bool
    """Whether it printed more than ``MOST_OUTPUT`` and was ended for that."""


class GroupCommand:
    """A command from its start on. ``run`` belongs to one thread; ``kill`` is anybody's."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        self._lock = threading.Lock()
        self._reaped = False
        self._size = 0
        self._kept: deque[bytes] = deque(maxlen=8)

    def run(self) -> CommandEnd:
        """Read its output until its leader exits, and end whoever is left of the group.

        Raises:
            OSError: it cannot be followed, and was ended.
        """
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        try:
            leader = os.pidfd_open(self._process.pid)
            try:
                self._read(output, leader)
            finally:
                os.close(leader)
            self.kill()
            self._read(output, None)
        finally:
            self.kill()
            with self._lock:
                code = self._process.wait()
                self._reaped = True
            self._process.stdout.close()
        words = b"".join(self._kept)[-LAST_WORDS:].decode("utf-8", "replace").strip()
        return CommandEnd(code, words, self._size > MOST_OUTPUT)

    def kill(self) -> None:
        """Send SIGKILL to the whole group, unless its leader has been waited for."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._reaped:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, output: int, leader: int | None) -> None:
        """Read until the leader has exited; without it, until there is no more, but not for ever"""
        poll = select.poll()
        poll.register(output, select.POLLIN)
        if leader is not None:
            poll.register(leader, select.POLLIN)
        give_up = time.monotonic() + _DRAIN_S
        while leader is not None or time.monotonic() < give_up:
            ready = {number for number, _ in poll.poll(None if leader is not None else 100)}
            if output in ready and not self._keep(os.read(output, _CHUNK)):
                poll.unregister(output)
                if leader is None:
                    return
            if leader in ready:
                return

    def _keep(self, text: bytes) -> bool:
        self._size += len(text)
        if text:
            self._kept.append(text[-LAST_WORDS:])
        if self._size > MOST_OUTPUT:
            self.kill()
        return bool(text)
