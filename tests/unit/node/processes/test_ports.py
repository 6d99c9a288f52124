"""Reserved ports: who may listen there, and what happens to one that somebody else has taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from libra_cli.node.processes.ports import Ports


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(port: int, *, share: bool) -> socket.socket:
    """As servers bind: with SO_REUSEADDR, and ours with SO_REUSEPORT too."""
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(share))
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


@pytest.fixture
def ports(tmp_path) -> Iterator[Ports]:
    made = Ports(tmp_path / "ports.json")
    yield made
    made.release([*made._reserved])


def test_only_a_server_of_ours_can_listen_on_a_reserved_port(ports, held) -> None:
    """A bind with SO_REUSEADDR, which anybody may try, got it before: the token went there."""
    (port,) = ports.take(22000, 22999, 1, ())
    with pytest.raises(OSError, match="in use"):
        listener(port, share=False)
    held.enter_context(listener(port, share=True))


def test_a_port_for_torch_is_free_for_its_process_and_reserved_after_it(ports) -> None:
    (port,) = ports.take(22000, 22999, 1, ())
    ports.release([port])
    with listener(port, share=False) as server, socket.create_connection(("127.0.0.1", port)):
        server.accept()[0].close()
    assert ports.take_back([port]) == {}
    with pytest.raises(OSError, match="in use"):
        listener(port, share=False)


def test_a_port_that_somebody_else_took_is_replaced_for_the_next_start(ports, held) -> None:
    first, second = ports.take(22000, 22999, 2, ())
    ports.release([first])
    held.enter_context(listener(first, share=False))
    moved = ports.take_back([first, second])
    assert moved.keys() == {first}
    assert moved[first] not in (first, second)
    with pytest.raises(OSError, match="in use"):
        listener(moved[first], share=False)


def test_the_successor_of_an_agent_reserves_what_it_had_reserved(ports, tmp_path) -> None:
    (port,) = ports.take(22000, 22999, 1, ())
    ports.release([port])  # as the kernel does, when it dies
    successor = Ports(tmp_path / "ports.json")
    successor.open()
    with pytest.raises(OSError, match="in use"):
        listener(port, share=False)
    successor.release([port])


@pytest.mark.parametrize("text", ["", "[]", '{"boot": 1}', "null"])
def test_a_damaged_record_of_ports_is_as_none(tmp_path, text) -> None:
    (tmp_path / "ports.json").write_text(text)
    Ports(tmp_path / "ports.json").open()
