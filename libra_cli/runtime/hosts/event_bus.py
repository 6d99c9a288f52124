"""Tells everybody who subscribes what hosts report, from the first connection on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from libra_cli.config.errors import HostLost
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    HostEvent,
    LeaseExpired,
    Reconnected,
    Rejoined,
)

Listener: TypeAlias = Callable[[HostEvent], None]


class HostEventBus:
    """Calls every listener with each event of a host.

    One that subscribes later first hears which hosts are lost or given up, so that none of it goes
    unheard while the parts of a run are made. Exits of processes are not kept: who starts one
    subscribes before.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        #: What was reported of the connection to each node since it was ready the last time.
        self._away: dict[str, list[HostEvent]] = {}

    def publish(self, event: HostEvent) -> None:
        """Take in what a host reports, and tell it."""
        so_far = self._away.setdefault(event.node, [])
        if isinstance(event, ConnectionLost | Rejoined):
            so_far.append(event)
        elif isinstance(event, LeaseExpired):
            so_far[:] = [event]
        elif isinstance(event, Reconnected):
            so_far[:] = [one for one in so_far if not isinstance(one, ConnectionLost)]
        for listener in self._listeners[:]:
            listener(event)

    def ready(self, node: str) -> None:
        """Take in that a host which was given up can be used again."""
        self._away.pop(node, None)

    def subscribe(self, listener: Listener) -> None:
        """Tell a listener what has become of hosts, and from now on whatever they report."""
        for event in [one for events in self._away.values() for one in events]:
            listener(event)
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Tell a listener nothing more, if it was told of anything."""
        self._listeners = [one for one in self._listeners if one != listener]

    @contextmanager
    def subscribed(self, listener: Listener) -> Iterator[None]:
        """Have a listener told for as long as this is entered."""
        self.subscribe(listener)
        try:
            yield
        finally:
            self.unsubscribe(listener)

    @asynccontextmanager
    async def all_needed(self) -> AsyncIterator[None]:
        """Break off what is done in here as soon as a host is given up.

        Raises:
            HostLost: one was.
        """
        given_up: list[LeaseExpired] = []

        def happened(event: HostEvent) -> None:
            if isinstance(event, LeaseExpired):
                if not given_up:
                    limit.reschedule(asyncio.get_running_loop().time())
                given_up.append(event)

        try:
            async with asyncio.timeout(None) as limit:
                with self.subscribed(happened):
                    yield
        except TimeoutError:
            if not given_up:
                raise
        if given_up:
            lost = given_up[0]
            raise HostLost(f"{lost.node}: given up after {lost.reason}")
