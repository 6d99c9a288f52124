"""Connections that are carried from one socket to another, and their end."""

from __future__ import annotations

import socket
import threading

from libra_cli.envs.agents import bridge
from libra_cli.envs.agents.bridge import Bridge

WITHIN_S = 20.0


def listening() -> socket.socket:
    """Return a socket that listens on a port of the loopback."""
    made = socket.create_server(("127.0.0.1", 0))
    made.settimeout(WITHIN_S)
    return made


def answer_once(server: socket.socket) -> None:
    """Send what a connection has said back to it, and leave it open."""
    peer, _ = server.accept()
    peer.sendall(peer.recv(100))
    peer.recv(1)  # until it is closed
    peer.close()


def test_what_is_still_open_at_the_end_is_closed_and_is_no_error(caplog):
    """Python 3.11 would log it; newer ones log no connection that was cancelled."""
    with listening() as behind, listening() as front:
        answering = threading.Thread(target=answer_once, args=[behind])
        answering.start()
        with Bridge(front, behind.getsockname()[1]):
            kept = socket.create_connection(front.getsockname(), timeout=WITHIN_S)
            kept.sendall(b"words")
            assert kept.recv(100) == b"words"
        with kept:
            assert kept.recv(1) == b""
        answering.join(WITHIN_S)
    assert not answering.is_alive()
    assert not caplog.records


def test_no_more_connections_are_carried_than_may_be(monkeypatch):
    monkeypatch.setattr(bridge, "MOST", 2)
    with listening() as behind, listening() as front, Bridge(front, behind.getsockname()[1]):
        here = front.getsockname()
        asking = [socket.create_connection(here, timeout=WITHIN_S) for _ in range(2)]
        carried = [behind.accept()[0] for _ in asking]
        with socket.create_connection(here, timeout=WITHIN_S) as third:
            assert third.recv(1) == b""
        carried[0].close()
        asking[0].close()
        for one in carried[1:] + asking[1:]:
            one.close()
        # There is room again once those are over, which the bridge hears a little later.
        again = b""
        while not again:
            with socket.create_connection(here, timeout=WITHIN_S) as fourth:
                behind.settimeout(0.2)
                try:
                    peer = behind.accept()[0]
                except TimeoutError:
                    continue
                with peer:
                    peer.sendall(b"words")
                    again = fourth.recv(5)
    assert again == b"words"
