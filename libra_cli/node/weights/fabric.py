"""The agent's end of a host's member of process groups (``libra_cli.node.fabric.member``).

The member is a process that is started with the first group and stays, since importing torch takes
seconds. One that does not answer in time is killed, and the next group has a new one. Standard
library only.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from libra_cli.node.agent_errors import AgentRefused

MODULE = "libra_cli.node.fabric.member"
IMPORT_S = 60.0
"""Seconds that a new member may take to import torch, on a slow disk."""
SILENT_S = 8.0
"""Seconds without a line after which a member hangs; it gives up its neighbours earlier."""


class FabricMember:
    """This host's member, and the group that it has joined last."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._group = ""
        self._busy = threading.Lock()

    def join(self, group: str, interface: str, rank: int, size: int) -> str:
        """Join a group that this name is given to, and return the address of this rank. Blocks.

        Raises:
            AgentRefused: the member is busy, or cannot listen on the interface.
        """
        order = {"op": "join", "interface": interface, "rank": rank, "size": size}
        with self._alone():
            is_new = self._process is None or self._process.poll() is not None
            answer = self._ask(order, silent_s=IMPORT_S if is_new else SILENT_S)
            self._group = group
        return str(answer["address"])

    def connect(self, group: str, addresses: Sequence[str]) -> None:
        """Connect to all other ranks of a group, and leave it. Blocks.

        Raises:
            AgentRefused: one cannot be reached, or the group is not the one joined last.
        """
        self._transfer(group, {"op": "connect", "addresses": [*addresses]}, silent_s=SILENT_S)

    def send(self, group: str, addresses: Sequence[str], directory: Path, limit_s: float) -> None:
        """Send the version in a directory to the rest of a group. Blocks.

        Raises:
            AgentRefused: the next rank is lost, or the group is not the one joined last.
        """
        order = {"op": "send", "directory": str(directory), "addresses": [*addresses]}
        self._transfer(group, order, silent_s=limit_s)

    def receive(
        self,
        group: str,
        addresses: Sequence[str],
        directory: Path,
        came: Callable[[str, int], None],
    ) -> None:
        """Receive a version into a directory that has its manifest and room for its files. Blocks.

        ``came`` is called with file and index of each chunk that is right. When this returns, or
        raises, nothing more is written.

        Raises:
            AgentRefused: the rank before is lost, or the group is not the one joined last.
        """
        order = {"op": "receive", "directory": str(directory), "addresses": [*addresses]}
        self._transfer(group, order, silent_s=SILENT_S, came=came)

    def _transfer(
        self,
        group: str,
        order: dict[str, Any],
        *,
        silent_s: float,
        came: Callable[[str, int], None] = lambda name, index: None,
    ) -> None:
        if group != self._group:
            raise AgentRefused("weights", f"the group {group} is not the one joined here")
        with self._alone():  # an order that comes again must not end what it has begun
            try:
                self._ask(order, silent_s=silent_s, came=came)
            except AgentRefused:
                self._kill()  # a group that has lost a rank may go on writing what still comes
                self._running()  # the next one imports torch before it is wanted
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other orders off meanwhile. Raises AgentRefused if one is being carried out."""
        if not self._busy.acquire(blocking=False):
            raise AgentRefused("weights", "another version is on its way over the fabric")
        try:
            yield
        finally:
            self._busy.release()

    def _ask(
        self,
        order: dict[str, Any],
        *,
        silent_s: float,
        came: Callable[[str, int], None] = lambda name, index: None,
    ) -> dict[str, Any]:
        self._write(order)
        while "chunk" in (answer := self._answer(silent_s)):
            name, index = answer["chunk"]
            came(str(name), int(index))
        if "error" in answer:
            raise AgentRefused("weights", str(answer["error"]))
        return answer

    def _write(self, order: dict[str, Any]) -> None:
        try:
            pipe = self._running().stdin
            assert pipe is not None
            pipe.write(json.dumps(order) + "\n")
            pipe.flush()
        except OSError as error:
            self._kill()
            raise AgentRefused("weights", f"{MODULE}: {error}") from error

    def _answer(self, silent_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=silent_s)
        except queue.Empty:
            self._kill()
            raise AgentRefused("weights", f"{MODULE} said nothing for {silent_s:.0f} s") from None
        if not line:
            self._kill()
            raise AgentRefused("weights", f"{MODULE} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._lines = queue.Queue()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            pipe = self._process.stdout
            assert pipe is not None
            threading.Thread(target=_read, args=[pipe, self._lines], daemon=True).start()
        return self._process

    def _kill(self) -> None:
        process, self._process, self._group = self._process, None, ""
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()

    def close(self) -> None:
        """Kill the member's process, if there is one."""
        self._kill()


def _read(pipe: IO[str], lines: queue.Queue[str]) -> None:
    """Put the lines of a pipe into a queue, and an empty one when it ends."""
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put("")
