"""Reserves TCP ports of one host for servers that start later.

A port that was merely seen free may be taken by the time a server that needs half a minute to start
binds it. So the agent binds the ports that it gives out and keeps them bound until it ends. Two
rules of Linux make that a reservation: a bind without options, which is how ports are probed here,
fails on any bound port; and where the first socket has ``SO_REUSEPORT`` alone, only a process of
the same user that has it too can bind and listen. Nobody else ever hears what is sent there.

Servers of ours bind in that way (``bind_port`` of ``node.http``), and so does the store of torch's
ranks as ``node.rendezvous`` launches them; other launchers of torch (of a backend plugin) do not. A
port of a process that binds by itself is let go just before it starts, and taken back when that
process has ended. If somebody else has it by then, another one takes its place, for the next start.
Standard library only.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.processes.private_files import write_private
from libra_cli.node.processes.proc import boot_id

PORTS = "ports.json"
"""The file in the run directory in which they are written down, for as long as the run lives."""


class Ports:
    """The ports this agent has given out; ``record`` is a file that a successor reads."""

    def __init__(self, record: Path | None = None) -> None:
        self._record = record
        self._reserved: dict[int, socket.socket] = {}
        self._range = (0, -1)

    def open(self) -> None:
        """Take over what an earlier agent of this boot had reserved, but for what is in use."""
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            found = json.loads(self._record.read_bytes()) if self._record else {}
            if found["boot"] == boot_id():
                self._range = int(found["first"]), int(found["last"])
                for port in found["ports"]:
                    self._reserve(int(port))

    def take(self, first: int, last: int, count: int, taken: Collection[int]) -> list[int]:
        """Reserve ``count`` ports of ``[first, last]`` that nobody uses and ``taken`` lacks.

        Raises:
            AgentRefused: there are fewer; none is reserved then.
        """
        found: list[int] = []
        for port in range(first, last + 1):
            if len(found) == count:
                break
            if port not in taken and port not in self._reserved and self._reserve(port):
                found.append(port)
        if len(found) < count:
            self.release(found)
            raise AgentRefused(
                "ports", f"{count} free ports wanted, {len(found)} in {first}-{last}"
            )
        self._range = first, last
        self._write()
        return found

    def release(self, ports: Collection[int]) -> None:
        """Unbind those of the ports that are reserved."""
        for port in ports:
            if (held := self._reserved.pop(port, None)) is not None:
                held.close()

    def take_back(self, ports: Collection[int]) -> dict[int, int]:
        """Reserve ports again that were released; returns another one for each that is taken."""
        moved = {}
        for port in ports:
            if port in self._reserved or self._reserve(port, used=True):
                continue
            with suppress(AgentRefused):  # none is free: the same again, which the start will tell
                (moved[port],) = self.take(*self._range, 1, ports)
        return moved

    def _reserve(self, port: int, *, used: bool = False) -> bool:
        """Bind a port; one that was ``used`` may have connections that are long closed."""
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(used))
            probe.bind(("0.0.0.0", port))
        except OSError:
            probe.close()
            return False
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved[port] = probe
        return True

    def _write(self) -> None:
        if self._record is None:
            return
        first, last = self._range
        told = {"boot": boot_id(), "first": first, "last": last, "ports": [*self._reserved]}
        with suppress(OSError):  # on a full disk: only a successor would miss it
            write_private(self._record, json.dumps(told))
