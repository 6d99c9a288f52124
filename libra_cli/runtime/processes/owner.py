"""Starts, reaches, adopts, watches and stops the processes of one part of a run.

Processes that start, fail and end together are a group: the one of a rollout server, those of a
gradient worker, or the trainer's launchers, one on each of its nodes. A group has a name, and an
incarnation, which another start of the same group does not have. The first of its processes is the
one that is spoken to.

A group is known from the moment its first process starts, so that an exit report that comes while
it is still loading ends the wait for it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from libra_cli.config.errors import LibraError, ProcessError
from libra_cli.core.events import Event
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.types import LostGpu
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.exits import how_it_ended
from libra_cli.runtime.hosts.lost_gpus import lost_gpus
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.tasks import ProcessTasks
from libra_cli.runtime.supervision.background import Background

STARTUP_TIMEOUT_S = 1800.0
"""A large model on a cold file system; a process that dies is noticed at once whatever this is."""


class ProcessConnection(Protocol):
    """A connection to the first process of a group."""

    async def close(self) -> None:
        """Close the connection; the process goes on."""


C = TypeVar("C", bound=ProcessConnection)
Stalled: TypeAlias = Callable[[Sequence[ProcessSpec], int], Coroutine[Any, Any, str]]
"""Returns once one of these processes, of that incarnation, does not go on; what to tell of it."""


class NotConnected(ProcessError):
    """No process of that name is connected, or it was stopped meanwhile."""


@dataclass(slots=True)
class _Group(Generic[C]):
    incarnation: int
    processes: Sequence[ProcessSpec]
    connection: C | None = None
    watching: asyncio.Task[None] | None = None
    stopping: bool = False
    failed: bool = False
    """Whether it ended, or did not do its work, and nobody had asked for that."""


class ProcessOwner(Generic[C]):
    """The groups of one kind, by name, each with the connection to it."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        connect: Callable[[str, int, Endpoint, str], C],
        failed: Callable[[str, int, str], Event],
        post: Callable[[Event], None],
        stalled: Stalled | None = None,
    ) -> None:
        """Describe a kind of group.

        ``connect`` makes a connection of a name, an incarnation, where the process listens and the
        run's token; ``failed`` makes the event that such a group has failed for a reason.
        ``stalled`` watches the processes of a group for as long as it runs.
        """
        self._cluster = cluster
        self._connect = connect
        self._failed = failed
        self._post = post
        self._stalled = stalled
        self._groups: dict[str, _Group[C]] = {}
        self._tasks = ProcessTasks()
        self._background = Background()

    # -- what runs ------------------------------------------------------------------------------

    def get(self, name: str, incarnation: int | None = None) -> C | None:
        """The connection to a group, if it has one and is of that incarnation."""
        group = self._groups.get(name)
        if group is None or incarnation not in (None, group.incarnation):
            return None
        return group.connection

    def connection(self, name: str) -> C:
        """Return the connection to a group; raises NotConnected."""
        connection = self.get(name)
        if connection is None:
            raise NotConnected(f"{name} is not connected")
        return connection

    async def during(
        self, name: str, incarnation: int, work: Coroutine[Any, Any, Event]
    ) -> Event | None:
        """Do work on a group; a LibraError is its failure. None if the group ends before."""
        return await self._tasks.during(name, work, partial(self._failure, name, incarnation))

    # -- coming ---------------------------------------------------------------------------------

    async def start(self, name: str, incarnation: int, processes: Sequence[ProcessSpec]) -> C:
        """Start the processes of a group, and connect to the first, which need not answer yet.

        Raises:
            LibraError: a host refuses, or cannot be reached.
        """
        group = await self._begin(name, incarnation, processes)
        for process in processes:
            await self._cluster.start(process)
        return await self._connected(name, group)

    async def adopt(self, name: str, incarnation: int, processes: Sequence[ProcessSpec]) -> C:
        """Connect to processes that were started so, by whomever. Raises HostError."""
        return await self._connected(name, await self._begin(name, incarnation, processes))

    async def renew(self, name: str, incarnation: int) -> C:
        """Connect anew to the processes of a group, which has this incarnation from now on.

        Raises:
            NotConnected: there is no such group.
            HostError: its host cannot be reached.
        """
        group = self._groups.get(name)
        if group is None:
            raise NotConnected(f"{name} is not connected")
        return await self.adopt(name, incarnation, group.processes)

    async def _begin(
        self, name: str, incarnation: int, processes: Sequence[ProcessSpec]
    ) -> _Group[C]:
        if (before := self._groups.get(name)) is not None:
            await self._let_go(before)
        group = self._groups[name] = _Group[C](incarnation, processes)
        return group

    async def _connected(self, name: str, group: _Group[C]) -> C:
        if self._stalled is not None:
            group.watching = self._background.keep(
                f"watching the processes of {name}", partial(self._until_stalled, name, group)
            )
        endpoint = await self._cluster.dial(group.processes[0])
        reached = group.incarnation, endpoint, self._cluster.token
        connection = group.connection = self._connect(name, *reached)
        return connection

    # -- going ----------------------------------------------------------------------------------

    async def stop(
        self,
        name: str,
        *also: tuple[str, str],
        leave: Callable[[C], Coroutine[Any, Any, None]] | None = None,
    ) -> tuple[LostGpu, ...]:
        """Stop the processes of a group with everything they started, and verify that they are
        gone, and those ``also``: a node and a process. ``leave`` asks the first before.

        Returns:
            The GPUs of a group that had failed which its hosts have lost.
        """
        self._tasks.end(name)
        group = self._groups.get(name)
        places = set(also)
        if group is not None:
            places |= {(one.node, one.process) for one in group.processes}
            await self._let_go(group, leave)
        failed = group.processes if group is not None and group.failed else ()
        stopping = asyncio.gather(*(self._cluster.stop(*place) for place in sorted(places)))
        lost, _ = await asyncio.gather(lost_gpus(self._cluster, failed), stopping)
        if self._groups.get(name) is group:
            self._groups.pop(name, None)
        return lost

    async def _let_go(
        self, group: _Group[C], leave: Callable[[C], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Stop watching the group's processes, call ``leave``, and close the connection."""
        group.stopping = True
        if group.watching is not None:
            group.watching.cancel()
        connection, group.connection = group.connection, None
        if connection is None:
            return
        if leave is not None:
            with contextlib.suppress(LibraError):  # it may be gone already; the agents find out
                await leave(connection)
        await connection.close()

    def exited(self, event: Exited) -> None:
        """Take in that a process is gone; if nobody asked for that, its group has failed."""
        if not event.requested:
            gone = event.node, event.process
            self._end(lambda one: (one.node, one.process) == gone, how_it_ended(event))

    def returned(self, node: str, alive: frozenset[str]) -> None:
        """End the processes of a node that were not ``alive`` when it answered again or was given
        up, since their end was never reported.
        """
        self._end(
            lambda one: one.node == node and one.process not in alive, "died while unreachable"
        )

    def _end(self, ended: Callable[[ProcessSpec], bool], how: str) -> None:
        """Tell that the groups of such processes have failed."""
        for name, group in self._groups.items():
            for one in group.processes if not group.stopping else ():
                if ended(one):
                    self._fail(name, group, f"{one.process} on {one.node} {how}")

    async def _until_stalled(self, name: str, group: _Group[C]) -> None:
        assert self._stalled is not None
        self._fail(name, group, await self._stalled(group.processes, group.incarnation))

    def _fail(self, name: str, group: _Group[C], reason: str) -> None:
        self._tasks.end(name)
        self._post(self._failure(name, group.incarnation, reason))

    def _failure(self, name: str, incarnation: int, reason: str) -> Event:
        """Return the event of a group that failed; its GPUs are asked for when it is stopped."""
        if (group := self._groups.get(name)) is not None:
            group.failed = True
        return self._failed(name, incarnation, reason)

    async def close(self) -> None:
        """Close all connections; the processes go on."""
        await self._background.close()
        for group in self._groups.values():
            await self._let_go(group)
        self._groups.clear()
