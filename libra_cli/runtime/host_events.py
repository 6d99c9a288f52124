"""What hosts report, as events of the machine: processes that ended, nodes lost and found again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from libra_cli.config.errors import LibraError
from libra_cli.core.events import Event, NodeBack, NodeLost
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
)
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses


class HostEvents:
    """Tells the owners of a host's processes, and the machine."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        servers: Servers,
        trainer: TrainerProcesses,
        workers: WorkerProcesses,
        *,
        post: Callable[[Event], None],
    ) -> None:
        self._hosts = hosts
        self._servers = servers
        self._trainer = trainer
        self._workers = workers
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def happened(self, event: HostEvent) -> None:
        """A host reports something. Call it from the loop's own thread."""
        if isinstance(event, Exited):
            self._servers.exited(event)
            self._trainer.exited(event)
            self._workers.exited(event)
        elif isinstance(event, ConnectionLost):
            self._post(NodeLost(event.node, event.reason))
        elif isinstance(event, LeaseExpired):
            self._returned(event.node, frozenset())
        elif isinstance(event, Reconnected):
            task = asyncio.create_task(self._take_stock(event.node))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take_stock(self, node: str) -> None:
        try:
            states = await self._hosts[node].processes()
        except LibraError:
            return  # lost again; there will be another Reconnected, or a LeaseExpired
        self._returned(node, frozenset(s.process for s in states if s.state == "running"))

    def _returned(self, node: str, alive: frozenset[str]) -> None:
        self._trainer.returned(node, alive)
        self._post(NodeBack(node, alive))
