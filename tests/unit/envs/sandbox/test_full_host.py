"""On a host that starts no further process a call fails, and no sandbox ends."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

import pytest

from libra_cli.envs.sandbox.helper import server
from libra_cli.envs.sandbox.helper.place import OnHost
from libra_cli.envs.sandbox.messages import receive, send
from libra_cli.envs.sandbox.spec import SandboxSpec

REFUSED = "no process can be started on this host: Resource temporarily unavailable"


@pytest.fixture(autouse=True)
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)


def told(ask: Callable[[socket.socket], None]) -> str:
    """Make a call with a body, have it answered by ``ask`` with its other end; returns why not."""
    ours, theirs = socket.socketpair()
    with ours:
        send(ours, {"call": "run"}, b"body")
        ask(theirs)
        answer, _ = receive(ours)
    return str(answer["failed"])


def test_a_call_is_refused_and_its_sandbox_goes_on() -> None:
    place = OnHost(SandboxSpec.of({"backend": "none"}))
    asked, other = socket.socketpair()
    with asked, other:
        read, write = os.pipe()
        os.close(read)
        refused = told(lambda call: server._answer(place, asked, [call.detach(), write]))
    assert refused == REFUSED
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(write)  # what came with the call is closed
    place.close()


def test_a_new_sandbox_is_refused_and_others_go_on() -> None:
    asked, other = socket.socketpair()
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def ask(call: socket.socket) -> None:
        with call:
            socket.send_fds(channel, [b"+"], [call.fileno()])
        server._fork_server(asked, [theirs.detach()])

    with asked, other, channel:
        assert told(ask) == REFUSED
