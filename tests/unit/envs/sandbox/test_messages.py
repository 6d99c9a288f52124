"""Messages between a sandbox and who asks it."""

from __future__ import annotations

import socket
from typing import Any

from libra_cli.envs.sandbox.messages import receive, send


class OneWrite:
    """A socket whose other side answers and closes as soon as a message's header is there."""

    def __init__(self, mine: socket.socket, other: socket.socket) -> None:
        self._mine, self._other = mine, other

    def sendall(self, data: bytes) -> None:
        self._mine.sendall(data)
        if self._other.fileno() >= 0:
            send(self._other, {"code": 7})
            self._other.close()


def test_who_answers_a_message_without_a_body_may_close_before_it_is_sent_whole() -> None:
    mine, other = socket.socketpair()
    with mine, other:
        channel: Any = OneWrite(mine, other)
        send(channel, {"command": "exit 7"})
        told, body = receive(mine)
    assert (told["code"], body) == (7, b"")
