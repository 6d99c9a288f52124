"""Hosts of a run for tests: their certificates, their URLs, and a client that shows one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache

from libra_cli.node.credentials import Credentials, PeerConnection
from libra_cli.runtime.credentials import authority
from libra_cli.runtime.credentials.authority import Authority, certified_name

TOKEN = "a-token-for-tests"
LOCAL = "127.0.0.1"


@cache
def _authority(run: str) -> Authority:
    return Authority.make()


@cache
def credentials_of(node: str = "here", *, run: str = "run", token: str = TOKEN) -> Credentials:
    """What a node of a run has; the authority of another run is another one."""
    return Credentials.of(token, _authority(run).issue(node))


def told(node: str = "here", *, run: str = "run") -> dict[str, str]:
    """What ``Host.open`` is given."""
    return dict(_authority(run).issue(node))


def url_of(port: int, node: str = "here") -> str:
    """Where a node of tests listens."""
    return authority.peer_url(LOCAL, port, node)


def ask(
    url: str,
    path: str,
    *,
    shows: Credentials | None = None,
    token: str = TOKEN,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """The status and the body of an answer. Raises OSError."""
    shows = shows or credentials_of("who asks")
    with closing(PeerConnection(url, shows.client(), 10.0)) as connection:
        given = {"Authorization": f"Bearer {token}"} | (headers or {})
        connection.request("GET", path, headers=given)
        response = connection.getresponse()
        return response.status, response.read()


class Relay:
    """A hop on the way to a server; it can change a bit of what comes back."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server((LOCAL, 0))
        self.port = int(self._listener.getsockname()[1])
        self.came_back = 0
        """Bytes, over all connections."""
        self.flip_at = -1
        """The byte to change, of those."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((LOCAL, self._target))
                for end in (client, server):  # as both ends do: nothing waits for an ack of TCP
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for way in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_back: bool) -> None:
        with suppress(OSError), source, target:
            while data := bytearray(source.recv(65536)):
                if is_back:
                    place = self.flip_at - self.came_back
                    if 0 <= place < len(data):
                        data[place] ^= 1
                    self.came_back += len(data)
                target.sendall(data)

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


@contextmanager
def relay(port: int, *, flip_at: int = -1) -> Iterator[Relay]:
    """A hop to that port."""
    hop = Relay(port)
    hop.flip_at = flip_at
    try:
        yield hop
    finally:
        hop.close()


__all__ = ["LOCAL", "TOKEN", "ask", "certified_name", "credentials_of", "relay", "told", "url_of"]
