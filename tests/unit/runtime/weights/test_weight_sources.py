"""Whom a host is told to fetch a version from."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.errors import HostError, WeightsError
from libra_cli.config.recipe import WeightSyncSpec
from libra_cli.core.events import PublishedVersion
from libra_cli.core.launch.process import HostFacts
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.credentials.authority import peer_url
from libra_cli.runtime.hosts.agent_messages import PulledVersion, Seat
from libra_cli.runtime.weights import versions as module
from libra_cli.runtime.weights.versions import Weights, weights_of

SPEC = WeightSyncSpec(keep_versions=2, timeout_s=5.0)


class FakeHost:
    """Serves at a port, and notes what it was asked to pull from."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.pulled: list[str] = []
        self.seats: list[Seat | None] = []
        self.serving = 0
        self.gone: set[str] = set()
        self.damaged_for = 0
        self.found = 0
        self.writes = 0
        self.transport = self
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def serve_weights(self, bind: str, port: int) -> int:
        self.bound = bind
        self.serving += 1
        return port

    async def pull(
        self, name: str, sources: list[str], *, timeout_s: float, size: int, seat: Seat | None
    ) -> PulledVersion:
        self.seats.append(seat)
        self.asked.append(sources)
        self.pulled.append(name)
        await self.may_end.wait()
        if name in self.gone:
            raise WeightsError(f"{name}: manifest.json: HTTP 404")
        if self.damaged_for:
            self.damaged_for -= 1
            raise WeightsError(f"{name}: t: model.bin is damaged in chunk 0")
        return PulledVersion(f"/shm/{name}", "full", {sources[-1]: 7}, 0.1, "")

    async def damaged(self, name: str, *, size: int) -> str:
        self.found += 1
        return "model.bin" if self.found == 1 else ""

    async def get(self, path: str) -> bytes:
        self.writes += 1
        if self.writes < 3:
            raise HostError(f"trainer: {path}: No such file or directory")
        return b"{}"

    async def forget(self, keep: list[str]) -> None:
        pass


def facts(node: str, *, data_address: str = "") -> HostFacts:
    return HostFacts(
        node,
        "py",
        "/w",
        "/w/r",
        "/shm",
        f"{node}.slow",
        data_address=data_address,
        own_address="10.0.0.9",
    )


def weights_on(hosts: dict[str, FakeHost], timeout_s: float = 5.0) -> Weights:
    cluster: Any = SimpleNamespace(
        hosts=hosts,
        facts={name: facts(name) for name in hosts},
        ports={name: {"weights": 21000} for name in hosts},
        run_id="r",
    )
    spec = WeightSyncSpec(keep_versions=2, timeout_s=timeout_s)
    return weights_of(cluster, spec, origin="trainer")


def version(step: int) -> PublishedVersion:
    return PublishedVersion(WeightVersion(0, step), 7, 0.0)


def test_servers_of_a_host_share_a_pull_under_way_and_none_that_is_over() -> None:
    """A replaced agent has neither the versions of the one before nor its open port."""
    hosts = {name: FakeHost() for name in ("trainer", "a")}
    weights = weights_on(hosts)

    async def play() -> None:
        hosts["a"].may_end.clear()
        both = asyncio.gather(*(weights.on("a", version(1)) for _ in range(2)))
        await asyncio.sleep(0.01)
        hosts["a"].may_end.set()
        first, second = await both
        assert (first.sent_bytes, second.sent_bytes) == (7, 0)
        assert hosts["a"].pulled == ["v000001-e0"]
        await weights.on("a", version(1))

    asyncio.run(play())
    assert hosts["a"].pulled == ["v000001-e0"] * 2
    assert hosts["a"].serving == 2


def test_a_version_that_was_replaced_while_a_host_was_away_is_said_to_be_gone() -> None:
    hosts = {name: FakeHost() for name in ("trainer", "a", "b")}
    weights = weights_on(hosts)
    hosts["a"].gone.add("v000004-e0")

    async def play() -> None:
        with pytest.raises(WeightsError, match="HTTP 404"):
            await weights.on("a", version(4))
        await weights.on("b", version(9))
        with pytest.raises(WeightsError, match="v000004-e0 is gone, v000009-e0 is newer"):
            await weights.on("a", version(4))

    asyncio.run(play())


def test_a_host_is_given_those_that_pulled_before_and_the_publisher_last() -> None:
    hosts = {name: FakeHost() for name in ("trainer", "a", "b")}
    cluster: Any = SimpleNamespace(
        hosts=hosts,
        facts={
            "trainer": facts("trainer", data_address="trainer.fast"),
            "a": facts("a", data_address="a.fast"),
            "b": facts("b"),
        },
        ports={name: {"weights": 21000} for name in hosts},
        run_id="r",
    )
    weights = weights_of(cluster, SPEC, origin="trainer")

    async def play() -> None:
        for step in (1, 2):
            published = PublishedVersion(WeightVersion(0, step), 7, 0.0)
            for node in ("a", "b"):
                await weights.on(node, published)

    asyncio.run(play())
    publisher = peer_url("trainer.fast", 21000, "trainer")
    assert hosts["a"].asked == [[publisher], [peer_url("b.slow", 21000, "b"), publisher]]
    assert hosts["b"].asked == [[peer_url("a.fast", 21000, "a"), publisher]] * 2
    assert not hosts["trainer"].asked
    bound = [host.bound for host in hosts.values()]
    assert bound == ["trainer.fast", "a.fast", "10.0.0.9"]  # of names that may be 127.0.1.1, none


def test_a_version_that_is_damaged_where_it_was_published_is_waited_for_until_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RENEWAL_S", 0.01)
    hosts = {name: FakeHost() for name in ("trainer", "a", "b")}
    weights = weights_on(hosts)
    hosts["a"].damaged_for = hosts["b"].damaged_for = 3

    async def play() -> None:
        places = await asyncio.gather(*(weights.on(node, version(1)) for node in ("a", "b")))
        assert [place.directory for place in places] == ["/shm/v000001-e0"] * 2

    asyncio.run(play())
    assert len(hosts["a"].pulled) == len(hosts["b"].pulled) == 4


def test_a_version_that_stays_damaged_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWAL_S", 0.05)
    hosts = {name: FakeHost() for name in ("trainer", "a")}
    weights = weights_on(hosts, 0.5)
    hosts["a"].damaged_for = 1000
    with pytest.raises(WeightsError, match="is damaged in chunk 0"):
        asyncio.run(weights.on("a", version(1)))
    assert len(hosts["a"].pulled) == 10, "once every RENEWAL_S of the 0.5 s that a pull may take"


def test_servers_of_the_publishing_host_wait_until_a_damaged_version_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RENEWAL_S", 0.01)
    hosts = {"trainer": FakeHost()}
    weights = weights_on(hosts)

    async def play() -> None:
        assert "is damaged on trainer" in await weights.damage("trainer", version(1))
        # Another server finds nothing there, and is not to be blamed for that.
        assert "being written again" in await weights.damage("trainer", version(1))
        assert await weights.renewed(version(1))
        assert await weights.damage("trainer", version(1)) == ""

    asyncio.run(play())
