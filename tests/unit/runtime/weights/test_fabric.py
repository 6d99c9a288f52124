"""Which hosts are in the process group that a version travels by."""

from __future__ import annotations

import asyncio
from typing import Any

from libra_cli.config.errors import WeightsError
from libra_cli.core.events import PublishedVersion
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.hosts.agent_messages import PulledVersion, Seat
from libra_cli.runtime.weights.fabric import Fabric, tried
from libra_cli.runtime.weights.versions import Weights

Joined = tuple[str, str, int, int]


class FakeHost:
    """Joins groups, or does not, and notes what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.joined: list[Joined] = []
        self.sent: list[Seat] = []
        self.seats: list[Seat | None] = []
        self.refuses = ""
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def join_fabric(
        self, group: str, interface: str, rank: int, size: int, *, timeout_s: float
    ) -> str:
        self.joined.append((group, interface, rank, size))
        if self.refuses:
            raise WeightsError(self.refuses)
        return f"{self.name} of {group}"

    async def connect_fabric(self, seat: Seat) -> None:
        if self.refuses:
            raise WeightsError(self.refuses)

    async def send_by_fabric(self, name: str, seat: Seat, *, timeout_s: float) -> None:
        self.sent.append(seat)
        await self.may_end.wait()

    async def serve_weights(self, bind: str, port: int) -> int:
        return port

    async def pull(self, name: str, sources: list[str], **more: Any) -> PulledVersion:
        seat = more["seat"]
        self.seats.append(seat)
        kind = "full" if seat is None or self.refuses else "fabric"
        return PulledVersion(f"/shm/{name}", kind, {"it": 7}, 0.1, self.refuses)

    async def forget(self, keep: list[str]) -> None:
        pass


def version(step: int) -> PublishedVersion:
    return PublishedVersion(WeightVersion(0, step), 7, 0.0)


def scene() -> tuple[dict[str, FakeHost], Fabric]:
    hosts = {name: FakeHost(name) for name in ("trainer", "a", "b")}
    told: Any = hosts
    return hosts, Fabric(told, "eth1", origin="trainer", timeout_s=5.0)


def test_who_asks_at_the_same_time_is_in_one_group_behind_the_publisher() -> None:
    async def play() -> None:
        hosts, fabric = scene()
        seats = await asyncio.gather(*(fabric.seat(node, version(1)) for node in ("b", "a")))
        assert seats[0] == seats[1]
        assert seats[0] is not None
        group = seats[0].group
        assert seats[0].addresses == tuple(f"{name} of {group}" for name in ("trainer", "b", "a"))
        assert [hosts[name].joined for name in ("trainer", "b", "a")] == [
            [(group, "eth1", rank, 3)] for rank in range(3)
        ]
        await asyncio.sleep(0)
        assert hosts["trainer"].sent == [seats[0]]

    asyncio.run(play())


def test_a_host_that_does_not_join_is_left_out_and_not_asked_for_a_while() -> None:
    async def play() -> None:
        hosts, fabric = scene()
        hosts["a"].refuses = "no such interface"
        seats = await asyncio.gather(*(fabric.seat(node, version(1)) for node in ("a", "b")))
        assert seats[0] is None
        assert seats[1] is not None
        assert seats[1].addresses == tuple(f"{n} of {seats[1].group}" for n in ("trainer", "b"))
        assert "no such interface" in fabric.reason("a")
        await asyncio.sleep(0)
        assert await fabric.seat("a", version(2)) is None
        assert len(hosts["a"].joined) == 1

    asyncio.run(play())


def test_nobody_waits_for_a_group_that_is_at_work_nor_for_a_publisher_that_does_not_join() -> None:
    async def play() -> None:
        hosts, fabric = scene()
        hosts["trainer"].may_end.clear()
        assert await fabric.seat("a", version(1)) is not None
        await asyncio.sleep(0)
        assert await fabric.seat("b", version(1)) is None
        assert "on its way" in fabric.reason("b")
        hosts["trainer"].may_end.set()
        await asyncio.sleep(0)
        assert await fabric.seat("b", version(1)) is not None
        await asyncio.sleep(0)
        hosts["trainer"].refuses = "no torch"
        assert await fabric.seat("a", version(2)) is None
        assert "trainer: it did not join: no torch" in fabric.reason("a")

    asyncio.run(play())


def test_a_version_that_did_not_come_by_its_group_says_why() -> None:
    async def play() -> None:
        hosts, _ = scene()
        told: Any = hosts
        place: Any = type("Address", (), {"listens_at": "10.0.0.1", "serves_at": "10.0.0.1"})
        weights = Weights(
            told,
            dict.fromkeys(hosts, place),
            dict.fromkeys(hosts, "/shm"),
            dict.fromkeys(hosts, 1),
            origin="trainer",
            keep=2,
            timeout_s=5.0,
            trusted_interface="eth1",
        )
        first = await weights.on("a", version(1))
        assert (first.kind, first.detail) == ("fabric", "")
        await weights.on("a", version(1))
        assert hosts["a"].seats[1] is None, "what a host has needs no group"
        hosts["b"].refuses = "Connection reset by peer"
        second = await weights.on("b", version(1))
        assert second.kind == "full"
        assert second.detail.startswith("not over the fabric: it did not join: Connection reset")

    asyncio.run(play())


def test_the_doctor_hears_who_does_not_join_and_who_reaches_nobody() -> None:
    async def play() -> None:
        hosts, _ = scene()
        told: Any = hosts
        good = await tried(told, "eth1")
        assert good.errors == {}
        assert good.seconds > 0
        hosts["b"].refuses = "no such interface"
        assert (await tried(told, "eth1")).errors == {"b": "it did not join: no such interface"}

    asyncio.run(play())
