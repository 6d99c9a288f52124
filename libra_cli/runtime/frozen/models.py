"""The frozen models of a run: all servers of them, and the endpoint at which they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from libra_cli.config.errors import ProcessError
from libra_cli.config.frozen_models import NOWHERE, ModelsAddress
from libra_cli.core.frozen.process import frozen_process
from libra_cli.core.frozen.slots import FrozenSlot
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.model_use import ModelUse, summed
from libra_cli.core.records import FrozenModelRecord, Record
from libra_cli.runtime.frozen.endpoint import ModelsEndpoint, wake
from libra_cli.runtime.frozen.files import ServedFiles
from libra_cli.runtime.frozen.server import FrozenServer
from libra_cli.runtime.hosts.agent_messages import HostEvent
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.supervision.background import Background


def models_of(run_dir: Path) -> list[FrozenModelRecord]:
    """Return what the frozen models of a run were before, as its database has it."""
    with Reader(run_dir) as reader:
        return reader.frozen_models()


class FrozenModels:
    """The servers of a run's frozen models, from ``opened`` on."""

    def __init__(
        self, slots: Sequence[FrozenSlot], cluster: Cluster, save: Callable[[Record], None]
    ) -> None:
        """Start nothing yet; the hosts of ``cluster`` are open when ``opened`` is entered."""
        self._slots = slots
        self._cluster = cluster
        self._save = save
        self._files = ServedFiles(cluster, save)
        self._servers: list[FrozenServer] = []
        #: What has been asked of servers that are gone, a use for each model.
        self._gone: tuple[ModelUse, ...] = ()
        self._background = Background()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def opened(
        self,
        *,
        attaching: Callable[[], bool] = lambda: False,
        recorded: Sequence[FrozenModelRecord] = (),
    ) -> AsyncIterator[ModelsAddress]:
        """Start all servers, and yield the address at which they answer.

        While it is ``attaching`` to a run it goes on with those that a killed controller has left:
        it waits for none, since what is asked of them waits, and if it ends it says of none that
        it has. ``recorded`` is what the models were in this run before.

        Raises:
            ProcessError: one ended before it served, or has other files than another.
        """
        self._files.recorded(recorded)
        if not self._slots:
            yield NOWHERE
            return
        for one in self._slots:
            server = self.add(one, self._save)
            live = partial(server.live, self.wake)
            self._background.keep(f"serving {one.model.name} on {one.slot.id}", live)
        endpoint = ModelsEndpoint(self._servers, self._changed)
        self._cluster.events.subscribe(self.happened)
        try:
            address = await endpoint.start()
            if not attaching():
                await self._all_serve()
            yield address
        finally:
            self._cluster.events.unsubscribe(self.happened)
            await endpoint.close()
            await self._background.close()
            for server in () if attaching() else self._servers:
                server.leave()

    def add(self, one: FrozenSlot, save: Callable[[Record], None]) -> FrozenServer:
        """Return a server of a slot, which is not started yet, and hand it requests once it serves.
        ``save`` keeps its rows."""
        process, compare = partial(self._process, one), partial(self._files.compare, one)
        server = FrozenServer(one, process, compare, self._cluster, save)
        self._servers.append(server)
        return server

    def remove(self, server: FrozenServer) -> None:
        """Forget a server that was added, and is gone, but for what it has done."""
        self._servers.remove(server)
        self._gone = summed([*self._gone, replace(server.used, servers=0, open=0)])

    @property
    def uses(self) -> tuple[ModelUse, ...]:
        """What has been asked of each model since the controller began."""
        return summed([*self._gone, *(server.used for server in self._servers)])

    def happened(self, event: HostEvent) -> None:
        """Take in what a host reports."""
        for server in self._servers:
            server.happened(event)

    async def _all_serve(self) -> None:
        done, _ = await asyncio.wait(
            [server.first for server in self._servers], return_when=asyncio.FIRST_EXCEPTION
        )
        for one in done:
            if isinstance(error := one.exception(), ProcessError):
                raise error

    def _process(self, one: FrozenSlot) -> ProcessSpec:
        host, facts = self._cluster.hosts[one.node.name], self._cluster.facts[one.node.name]
        return frozen_process(one, facts, path=host.expand(one.model.path))

    def wake(self) -> None:
        """Let requests that wait look for a server again."""
        wake(self._changed)
