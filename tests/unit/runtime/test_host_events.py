"""What the machine hears of hosts that are lost, given up and there again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from libra_cli.config.errors import HostError, HostLost
from libra_cli.core.events import Event, NodeBack, NodeGone, NodeLost
from libra_cli.runtime import host_events
from libra_cli.runtime.host_events import HostEvents
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    HostEvent,
    LeaseExpired,
    Reconnected,
    Rejoined,
)
from libra_cli.runtime.hosts.event_bus import HostEventBus


class Trainer:
    """The owner of the trainer's processes."""

    def __init__(self, told: list[object]) -> None:
        self.processes = self
        self.told = told

    def returned(self, node: str, alive: frozenset[str]) -> None:
        self.told.append(("trainer", node, alive))


class Parts:
    """A cluster and weights, which note what they are told, as their trainer does."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.faults: list[Exception] = []
        self.hosts: dict[str, Any] = {"n1": self}
        self.ports = {"n1": {"weights": 21000}}
        self.facts = {"n1": self}
        self.peer_address = "10.0.0.1"
        self.trainer = Trainer(self.told)
        self.weights = self

    async def restore(self, node: str) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.told.append(("restored", node))

    def rejoined(self, node: str, address: str, port: int) -> None:
        self.told.append(("weights", node, address, port))

    async def processes(self) -> list[Any]:
        return []


def test_a_node_is_told_back_once_it_is_ready_again(monkeypatch) -> None:
    monkeypatch.setattr(host_events, "FIRST_PAUSE_S", 0.01)

    async def scene() -> None:
        parts = Parts()
        parts.faults = [HostError("its model is gone")]
        posted: list[Event] = []
        back = asyncio.Event()

        def post(event: Event) -> None:
            posted.append(event)
            if isinstance(event, NodeBack):
                back.set()

        fake = cast("Any", parts)
        told = HostEvents(fake, fake, post=post)
        told.happened(ConnectionLost("n1", "cut"))
        told.happened(LeaseExpired("n1", "gone"))
        told.happened(LeaseExpired("n1", "and again"))
        told.happened(Rejoined("n1", 99.0))
        told.happened(ConnectionLost("n1", "while it is made ready"))
        told.happened(Reconnected("n1", 1.0))
        async with asyncio.timeout(5.0):
            await back.wait()
        assert posted == [
            NodeLost("n1", "cut"),
            NodeGone("n1", "gone"),
            NodeBack("n1", frozenset()),
        ]
        assert parts.told == [
            ("trainer", "n1", frozenset()),
            ("restored", "n1"),
            ("weights", "n1", "10.0.0.1", 21000),
        ]
        await told.close()

    asyncio.run(scene())


def test_what_became_of_hosts_while_the_parts_were_made_is_told_too() -> None:
    async def scene() -> None:
        parts, bus, posted = Parts(), HostEventBus(), list[Event]()
        for event in (
            ConnectionLost("n1", "cut"),
            LeaseExpired("n1", "gone"),
            ConnectionLost("n2", "cut"),
            ConnectionLost("n3", "cut"),
            Reconnected("n3", 1.0),
        ):
            bus.publish(event)
        fake = cast("Any", parts)
        told = HostEvents(fake, fake, post=posted.append)
        bus.subscribe(told.happened)
        assert posted == [NodeGone("n1", "gone"), NodeLost("n2", "cut")]
        bus.unsubscribe(told.happened)
        bus.publish(ConnectionLost("n3", "cut"))
        assert len(posted) == 2
        await told.close()

    asyncio.run(scene())


def test_a_host_that_is_ready_again_is_news_no_more() -> None:
    bus, heard = HostEventBus(), list[object]()
    bus.publish(LeaseExpired("n1", "gone"))
    bus.publish(Rejoined("n1", 99.0))
    bus.publish(ConnectionLost("n1", "cut"))
    bus.publish(Reconnected("n1", 1.0))
    with bus.subscribed(heard.append):
        assert heard == [LeaseExpired("n1", "gone"), Rejoined("n1", 99.0)]
    bus.ready("n1")
    with bus.subscribed(heard.append):
        assert len(heard) == 2


def test_what_needs_all_hosts_ends_with_the_first_that_is_given_up() -> None:
    async def scene(*events: HostEvent, before: bool) -> None:
        bus = HostEventBus()
        if before:
            bus.publish(events[0])
        async with asyncio.timeout(5.0), bus.all_needed():
            for event in events:
                bus.publish(event)
            await asyncio.get_running_loop().create_future()

    gone = LeaseExpired("n1", "no answer"), LeaseExpired("n2", "no answer")
    for before in (False, True):
        with pytest.raises(HostLost, match=r"^n1: given up after no answer$"):
            asyncio.run(scene(*gone, before=before))


def test_what_needs_all_hosts_goes_on_while_one_is_only_lost() -> None:
    async def scene() -> None:
        bus = HostEventBus()
        async with bus.all_needed():
            bus.publish(ConnectionLost("n1", "cut"))
            await asyncio.sleep(0)

    asyncio.run(scene())
