"""Turns what hosts report into events of the machine: processes that ended, nodes lost and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from libra_cli.config.errors import LibraError
from libra_cli.core.events import Event, NodeBack, NodeGone, NodeLost
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
    Rejoined,
)
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.performer import Performer
from libra_cli.runtime.supervision.background import Background

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Between two attempts to make a host that has rejoined ready."""
_log = logging.getLogger(__name__)


class HostEvents:
    """Tells the owners of a host's processes, and the machine."""

    def __init__(
        self,
        cluster: Cluster,
        owners: Performer,
        *,
        post: Callable[[Event], None],
    ) -> None:
        self._cluster = cluster
        self._owners = owners
        self._post = post
        self._background = Background()
        #: The hosts that were given up and are not ready yet, and the work on those that answer.
        self._gone: dict[str, asyncio.Task[None] | None] = {}

    def happened(self, event: HostEvent) -> None:
        """Act on what a host reports; call it from the loop's own thread."""
        match event:
            case Exited():
                for owner in (self._owners.servers, self._owners.trainer, self._owners.workers):
                    owner.processes.exited(event)
            case LeaseExpired(node, reason):
                self._given_up(node, reason)
            case Rejoined(node):
                work = self._background.start(f"making {node} ready", self._make_ready(node))
                self._gone[node] = work
            case ConnectionLost(node, reason) if node not in self._gone:
                self._post(NodeLost(node, reason))
            case Reconnected(node) if node not in self._gone:
                self._background.start(f"asking {node} what runs there", self._take_stock(node))

    async def close(self) -> None:
        await self._background.close()

    async def _take_stock(self, node: str) -> None:
        try:
            states = await self._cluster.hosts[node].processes()
        except LibraError:
            return  # lost again; there will be another Reconnected, or a LeaseExpired
        alive = frozenset(s.process for s in states if s.state == "running")
        self._owners.trainer.processes.returned(node, alive)
        self._post(NodeBack(node, alive))

    def _given_up(self, node: str, reason: str) -> None:
        if (work := self._gone.get(node)) is not None:
            work.cancel()
        if node not in self._gone:  # else the machine waits for it already
            self._owners.trainer.processes.returned(node, frozenset())
            self._post(NodeGone(node, reason))
        self._gone[node] = None

    async def _make_ready(self, node: str) -> None:
        """Prepare a host with a new agent, as often as it takes, and tell the machine."""
        pause_s, told = FIRST_PAUSE_S, ""
        while True:
            try:
                await self._cluster.restore(node)
                break
            except LibraError as error:
                if str(error) != told:
                    _log.error("%s answers again and cannot be used: %s", node, error)
                told = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        address, ports = self._cluster.facts[node].peer_address, self._cluster.ports[node]
        self._owners.weights.rejoined(node, address, ports.get("weights", 0))
        del self._gone[node]
        self._post(NodeBack(node, frozenset()))
