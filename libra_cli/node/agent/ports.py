"""Reserves TCP ports of one host for servers that start later.

A port that was merely seen free may be taken by the time a server that needs half a minute to start
binds it. So the agent binds the ports that it gives out and keeps them bound, without listening,
until it ends. Two rules of Linux make that a reservation: a bind *without* ``SO_REUSEADDR``, which
is how ports are probed here, fails on any bound port; a bind *with* it, which is how servers bind,
fails only if somebody listens.
"""

from __future__ import annotations

import socket
from collections.abc import Collection

from libra_cli.node.agent.agent_errors import AgentRefused


class Ports:
    """The ports this agent has given out."""

    def __init__(self) -> None:
        self._reserved: dict[int, socket.socket] = {}

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
        return found

    def release(self, ports: Collection[int]) -> None:
        """Unbind ports that were reserved."""
        for port in ports:
            self._reserved.pop(port).close()

    def _reserve(self, port: int) -> bool:
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            probe.close()
            return False
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved[port] = probe
        return True
