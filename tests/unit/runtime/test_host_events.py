"""What the machine hears of hosts that are lost, given up and there again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from libra_cli.config.errors import HostError
from libra_cli.core.events import Event, NodeBack, NodeGone, NodeLost
from libra_cli.runtime import host_events
from libra_cli.runtime.host_events import HostEvents
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    LeaseExpired,
    Reconnected,
    Rejoined,
)


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
