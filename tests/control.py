"""A client of a control stream, for tests: one message after the other, as they are on the wire."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import msgpack

DEADLINE_S = 20.0


class ControlConnection:
    """A connection that begins with these bytes, of which the token should be the first."""

    def __init__(self, path: str, first: bytes, *, timeout_s: float = DEADLINE_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout_s)
        self.sock.connect(path)
        self.sock.sendall(first)
        self.unpacker = msgpack.Unpacker(max_buffer_size=0)

    def send(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(map(msgpack.packb, messages)))

    def answers(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the other side has closed the connection")
            self.unpacker.feed(data)
            found += self.unpacker
        return found


def ask(
    path: str,
    token: str,
    operation: str,
    order: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = DEADLINE_S,
) -> tuple[str, Any]:
    """The outcome and the answer of one order, over a connection of its own.

    Raises:
        OSError: nobody listens, hangs up, or no answer comes in time.
    """
    connection = ControlConnection(path, msgpack.packb(token), timeout_s=timeout_s)
    with connection.sock:
        connection.send([7, operation, order or {}])
        ((call, outcome, answer),) = connection.answers(1)
    assert call == 7
    return outcome, answer


def is_silent(path: str, token: str, operation: str, order: Mapping[str, Any]) -> bool:
    """Whether an order is not answered yet, while another is."""
    connection = ControlConnection(path, msgpack.packb(token))
    with connection.sock:
        connection.send([1, operation, order], [2, "check", {}])
        answered = connection.answers(1)
        return bool(answered == [[2, "done", {}]])
