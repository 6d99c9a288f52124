"""Brings published weight versions to the hosts that need them.

The trainer publishes a version as a directory on its own host. The other hosts pull it over mutual
TLS (``runtime.credentials.authority``) from the trainer's host and from each other: every host
passes on the chunks that it has, so that the trainer's link is not the only one that works. Every
chunk is checked against the manifest, since a host may pass on what its own disk has damaged, and
the directory gets its name when all are there. Each host pulls a version once, however many servers
it has. A host that has the version before pulls only the difference.

With ``weight_sync.trusted_interface`` a version comes by a process group first (``fabric``), and
only what did not come so is pulled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index

from libra_cli.config.errors import LibraError, WeightsError
from libra_cli.config.recipe import WeightSyncSpec
from libra_cli.core.events import PublishedVersion
from libra_cli.core.launch.process import PeerAddress
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.credentials.authority import peer_url
from libra_cli.runtime.hosts.agent_messages import PulledVersion, Seat
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.supervision.answers import finite, understood
from libra_cli.runtime.weights.fabric import Fabric

RENEWAL_S = 1.0
"""Seconds between two attempts to pull a version that the trainer writes again."""


@dataclass(frozen=True, slots=True)
class VersionLocation:
    """Where a version lies on a host, and what its transfer cost."""

    directory: str
    pull_s: float
    kind: str
    """``full | delta | fabric | local``"""
    sent_bytes: int
    """Bytes that were sent for this request; 0 for the second server of a host."""
    detail: str = ""
    """Why it did not come by a process group, where the recipe has them; empty otherwise."""


@dataclass(frozen=True, slots=True)
class ExpectedProbe:
    """A fixed token sequence ``[T]`` and the trainer's log-probabilities ``[T - 1]``, in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Weights:
    """Weight versions on all hosts of a run."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        addresses: Mapping[str, PeerAddress],
        directories: Mapping[str, str],
        ports: Mapping[str, int],
        *,
        origin: str,
        keep: int,
        timeout_s: float,
        trusted_interface: str | None = None,
    ) -> None:
        """Describe the hosts of a run, by node.

        ``directories`` hold the run's version directories; peers reach a node at its ``addresses``
        and ``ports``. ``origin`` is the node whose trainer publishes. ``keep`` versions stay.
        With a ``trusted_interface`` versions travel by process groups on it first.
        """
        self._hosts = hosts
        self._addresses = {**addresses}
        self._directories = directories
        self._ports = {**ports}
        self.origin = origin
        self._keep = keep
        self._timeout_s = timeout_s
        self._fabric = (
            Fabric(hosts, trusted_interface, origin=origin, timeout_s=timeout_s)
            if trusted_interface is not None
            else None
        )
        self._urls: dict[str, str] = {}
        self._pulls: dict[tuple[str, str], asyncio.Task[VersionLocation]] = {}
        self._have: dict[str, list[str]] = {}
        #: Names of versions that were damaged where they were published, and removed there.
        self._renewed: set[str] = set()
        self._newest: WeightVersion | None = None
        #: Size in bytes of the newest version that was asked for.
        self.newest_bytes = 0

    async def on(self, node: str, published: PublishedVersion) -> VersionLocation:
        """Return where the version lies on a node, and pull it if it is not there yet.

        Raises:
            WeightsError: no source has it whole.
            HostLost: the node does not answer.
        """
        self.newest_bytes = published.bytes
        self._newest = max(self._newest or published.version, published.version)
        if node == self.origin:
            # Without awaiting: requests that this version allows must not overtake it.
            return VersionLocation(f"{self._directories[node]}/{published.name}", 0.0, "local", 0)
        key = (node, published.name)
        task = self._pulls.get(key)
        if task is not None:
            return replace(await asyncio.shield(task), kind="local", sent_bytes=0, detail="")
        # Only while it is under way: a host whose agent was replaced has lost what it had.
        task = self._pulls[key] = asyncio.create_task(self._pull(node, published))
        try:
            return await asyncio.shield(task)
        finally:
            if self._pulls.get(key) is task:
                del self._pulls[key]

    async def _pull(self, node: str, published: PublishedVersion) -> VersionLocation:
        name, fabric, seat = published.name, self._fabric, None
        if fabric is not None and name not in self._have.get(node, []):
            seat = await fabric.seat(node, published)
        pulled = await self._pulled(node, published, seat)
        detail = ""
        if fabric is not None and pulled.kind in ("full", "delta"):
            told = pulled.detail if seat is not None else fabric.reason(node)
            detail = f"not over the fabric: {told}"
        others = [other for other in self._have.get(node, []) if other != name]
        held = self._have[node] = [*others, name][-self._keep :]
        await self._hosts[node].forget(held)
        place = VersionLocation(pulled.path, pulled.seconds, pulled.kind, pulled.sent_bytes)
        return replace(place, detail=detail)

    async def _pulled(
        self, node: str, published: PublishedVersion, seat: Seat | None
    ) -> PulledVersion:
        """Have a host pull a version from all sources, or its renewal if it is damaged at its
        publisher.
        """
        tries = max(1, round(self._timeout_s / RENEWAL_S))
        while True:
            try:
                self._urls.pop(node, None)  # its agent may be another, which does not serve yet
                await self._url(node)  # it passes on what it has from now on
                return await self._hosts[node].pull(
                    published.name,
                    await self._sources(node),
                    timeout_s=self._timeout_s,
                    size=published.bytes,
                    seat=seat,
                )
            except WeightsError as error:
                seat = None  # that group is over
                self._urls.clear()  # a replaced agent must be asked to serve again
                if self._newest is not None and published.version < self._newest:
                    newer = f"{published.name} is gone, {self._newest.name} is newer"
                    raise WeightsError(newer) from error
                tries -= 1
                if tries == 0 or not await self._is_renewed(published, str(error)):
                    raise
                await asyncio.sleep(RENEWAL_S)

    async def _is_renewed(self, published: PublishedVersion, reason: str) -> bool:
        """Whether the trainer writes it again, as it does if its own copy was found damaged.

        It is only looked at if a source gave something wrong: all of it has to be read.
        """
        if "is damaged" in reason:
            await self.damage(self.origin, published)
        return published.name in self._renewed

    async def damage(self, node: str, published: PublishedVersion) -> str:
        """Why a version that a server on that node refused is no version; empty if it is right.

        A copy that is damaged is removed, so that the next request pulls it again. Where it was
        published, the trainer notices that, and writes the version again from memory.
        """
        try:
            wrong = await self._hosts[node].damaged(published.name, size=published.bytes)
        except LibraError:
            return ""  # the server's own words are all there is
        if wrong and node == self.origin:
            self._renewed.add(published.name)
        if wrong:
            return f"{wrong} of {published.name} is damaged on {node}"
        renewing = node == self.origin and published.name in self._renewed
        if renewing and not await self._is_there(published):
            return f"{published.name} is being written again on {node}"
        return ""

    async def renewed(self, published: PublishedVersion) -> bool:
        """Wait until a version that was damaged where it was published is written again there.

        False if it is not within ``timeout_s``; nobody waits for one that is no longer the newest.
        """
        for _ in range(max(1, round(self._timeout_s / RENEWAL_S))):
            is_old = self._newest is not None and published.version < self._newest
            if is_old or await self._is_there(published):
                return True
            await asyncio.sleep(RENEWAL_S)
        return False

    async def _is_there(self, published: PublishedVersion) -> bool:
        """Say whether the version is complete on the host that published it."""
        try:
            await self._manifest(published)
        except LibraError:
            return False
        return True

    async def _manifest(self, published: PublishedVersion) -> bytes:
        path = self._manifest_path(published)
        return await self._hosts[self.origin].transport.get(path)

    def _manifest_path(self, published: PublishedVersion) -> str:
        return f"{self._directories[self.origin]}/{published.name}/manifest.json"

    def rejoined(self, node: str, address: PeerAddress, port: int) -> None:
        """A node begins anew, perhaps at another address and port: it has no version any more."""
        self._addresses[node], self._ports[node] = address, port
        self._urls.clear()  # every agent says its own again
        self._have.pop(node, None)
        for key in [key for key in self._pulls if key[0] == node]:
            self._pulls.pop(key).cancel()

    async def probe(self, published: PublishedVersion) -> ExpectedProbe:
        """Read the probe, with which every server that has loaded the version must agree.

        Raises:
            WeightsError: the manifest is damaged.
            HostLost: the origin does not answer.
        """
        path, raw = self._manifest_path(published), await self._manifest(published)
        with understood(WeightsError, f"{self.origin}: {path} is damaged: it"):
            probe = json.loads(raw)["probe"]
            token_ids = tuple(index(token) for token in probe["token_ids"])
            return ExpectedProbe(token_ids, tuple(finite(one) for one in probe["logprobs"]))

    async def _sources(self, node: str) -> list[str]:
        """The URLs of the other hosts that serve versions, and the origin's last.

        Those that have not begun with this one yet are among them: they will pass it on.
        """
        origin = await self._url(self.origin)
        peers = [url for peer, url in self._urls.items() if peer not in (node, self.origin)]
        return [*peers, origin]

    async def _url(self, node: str) -> str:
        if node not in self._urls:
            address = self._addresses[node]
            port = await self._hosts[node].serve_weights(address.listens_at, self._ports[node])
            self._urls[node] = peer_url(address.serves_at, port, node)
        return self._urls[node]


def weights_of(cluster: Cluster, spec: WeightSyncSpec, *, origin: str) -> Weights:
    """Return the weight versions of an open cluster, whose trainer publishes on ``origin``."""
    facts = cluster.facts
    return Weights(
        cluster.hosts,
        {name: fact.peer_address for name, fact in facts.items()},
        {name: f"{fact.weights_dir}/{cluster.run_id}" for name, fact in facts.items()},
        {name: ports.get("weights", 0) for name, ports in cluster.ports.items()},
        origin=origin,
        keep=spec.keep_versions,
        timeout_s=spec.timeout_s,
        trusted_interface=spec.trusted_interface,
    )
