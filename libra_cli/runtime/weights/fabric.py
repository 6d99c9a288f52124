"""Forms the process groups that versions travel by, on a network that the recipe trusts.

The hosts that ask for a version at nearly the same time become the ranks of a group of their own,
with the publisher's host as rank 0, which sends. Whoever asks later is in another group, or pulls,
if a group is still at work. So a group never changes, and one that has lost a host is over: what
its other hosts lack they pull. Addresses go by the agents' streams (``node.fabric.group``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

from libra_cli.config.errors import LibraError
from libra_cli.core.events import PublishedVersion
from libra_cli.core.preflight.host_report import FabricReport
from libra_cli.runtime.hosts.agent_messages import Seat
from libra_cli.runtime.hosts.host import Host

GATHER_S = 0.05
"""Seconds that the first host that asks for a version waits for others."""
JOIN_S = 10.0
"""Seconds within which a host has to join a group; its first one, in which torch is imported, it
may miss."""
FIRST_JOIN_S = 60.0
"""The same where nobody waits for it."""
AWAY_S = 60.0
"""Seconds for which a host that did not join is not asked again."""

_log = logging.getLogger(__name__)


async def joined(
    hosts: Mapping[str, Host], nodes: Sequence[str], interface: str, *, timeout_s: float
) -> tuple[Seat, dict[str, str]]:
    """Have hosts join a new group, with ranks in their order.

    Returns:
        The seat in it, and why hosts have not joined, by node; with any, the group is of no use.
    """
    group = secrets.token_hex(8)
    problems: dict[str, str] = {}

    async def join(rank: int, node: str) -> str:
        try:
            return await hosts[node].join_fabric(
                group, interface, rank, len(nodes), timeout_s=timeout_s
            )
        except LibraError as error:
            problems[node] = f"it did not join: {error}"
            return ""

    addresses = await asyncio.gather(*(join(rank, node) for rank, node in enumerate(nodes)))
    return Seat(group, tuple(addresses)), problems


async def tried(hosts: Mapping[str, Host], interface: str) -> FabricReport:
    """Form a group of all hosts in which each reaches all others, and tell of whom it failed."""
    seat, problems = await joined(hosts, [*hosts], interface, timeout_s=FIRST_JOIN_S)
    if problems:
        return FabricReport(problems)
    began = time.monotonic()

    async def connect(node: str) -> None:
        try:
            await hosts[node].connect_fabric(seat)
        except LibraError as error:
            problems[node] = str(error)

    await asyncio.gather(*map(connect, hosts))
    return FabricReport(problems, time.monotonic() - began)


class Fabric:
    """The process groups of a run."""

    def __init__(
        self, hosts: Mapping[str, Host], interface: str, *, origin: str, timeout_s: float
    ) -> None:
        """Form no group yet. Versions come from ``origin``; hosts listen on ``interface`` alone."""
        self._hosts = hosts
        self._interface = interface
        self._origin = origin
        self._timeout_s = timeout_s
        self._asking: dict[str, list[str]] = {}
        self._forming: dict[str, asyncio.Task[Mapping[str, Seat]]] = {}
        self._sending: asyncio.Task[None] | None = None
        self._away: dict[str, float] = {}
        """Until when a host is not asked, on ``time.monotonic``."""
        self._problems: dict[str, str] = {}
        """Why a host was without a seat; it goes when the host has one."""

    async def seat(self, node: str, published: PublishedVersion) -> Seat | None:
        """Return the seat of a host in the group that takes a version; None if it is to pull."""
        if self._is_away(node) or self._is_away(self._origin):
            return None
        if self._sending is not None and not self._sending.done():
            self._problems[node] = "another version was on its way"
            return None
        name = published.name
        self._asking.setdefault(name, []).append(node)
        if name not in self._forming:
            self._forming[name] = asyncio.create_task(self._form(published))
        seat = (await asyncio.shield(self._forming[name])).get(node)
        if seat is not None:
            self._problems.pop(node, None)
        return seat

    def reason(self, node: str) -> str:
        """Why a host had no seat when it asked last."""
        return self._problems.get(node) or f"{self._origin}: {self._problems.get(self._origin)}"

    def _is_away(self, node: str) -> bool:
        return self._away.get(node, 0.0) > time.monotonic()

    async def _form(self, published: PublishedVersion) -> Mapping[str, Seat]:
        """Have a group joined by all that ask now, without those that do not join in time."""
        await asyncio.sleep(GATHER_S)
        nodes = [self._origin, *self._asking.pop(published.name)]
        del self._forming[published.name]  # who asks from now on is in another group
        while len(nodes) > 1:
            seat, problems = await joined(self._hosts, nodes, self._interface, timeout_s=JOIN_S)
            if not problems:
                self._sending = asyncio.create_task(self._send(published, seat))
                return dict.fromkeys(nodes[1:], seat)
            self._problems |= problems
            self._away |= dict.fromkeys(problems, time.monotonic() + AWAY_S)
            if self._origin in problems:
                break
            nodes = [node for node in nodes if node not in problems]
        return {}

    async def _send(self, published: PublishedVersion, seat: Seat) -> None:
        try:
            await self._hosts[self._origin].send_by_fabric(
                published.name, seat, timeout_s=self._timeout_s
            )
        except LibraError as error:  # the hosts that lack something pull it
            _log.warning("%s was not sent to all by its group: %s", published.name, error)
