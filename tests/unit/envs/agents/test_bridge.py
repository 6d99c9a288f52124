"""Connections that are carried from one socket to another, and their end."""

from __future__ import annotations

import socket
import threading

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
