"""Torch's store listens on a port that the run's agent holds all the while."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.processes.ports import Ports
from libra_cli.node.rendezvous import store_at
from tests.trainers import free_port

DEADLINE = timedelta(seconds=20)


def test_ranks_meet_on_a_port_that_stays_reserved() -> None:
    first = free_port()
    ports = Ports()
    (port,) = ports.take(first, first + 200, 1, ())
    with closing(ports._reserved[port]):
        store = store_at("127.0.0.1", port, 2, True, DEADLINE, wait_for_workers=False)
        rank = store_at("127.0.0.1", port, 2, False, DEADLINE, wait_for_workers=False)
        rank.set("key", "value")
        assert store.get("key") == b"value"
