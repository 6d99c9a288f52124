"""Connections of clients to a process: messages of msgpack, served by one thread.

A connection begins with the run's token. Until it is there nothing else is read and nothing is
answered; a wrong one closes the connection. After that every message is a list, and so is every
answer; msgpack tells where one ends. No call here waits for a client: what a client does not take
is kept for it.
"""

from __future__ import annotations

import hmac
import itertools
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import msgpack

RECEIVE_BYTES = 1 << 18
LONGEST_TOKEN = 1024
"""Bytes that are kept of a client that has not shown the token."""
LONGEST_VALUE = 1 << 30
"""Bytes of one value in a message: the routes of half a million tokens through 128 layers of eight
experts each. A batch is many values."""

QUEUE = 1024
"""Connections that wait to be taken. A Unix socket refuses more at once."""

Message: TypeAlias = list[Any]


class Connection:
    """A client of ``Connections``: its socket, and what is still to be sent to it."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        """The number of this connection, which no later one of the same server has."""
        self.trusted = False
        self.unsent = bytearray()
        self._unpacker = msgpack.Unpacker(max_buffer_size=LONGEST_TOKEN)

    def send(self, message: Message) -> None:
        """Append a message to ``unsent``, which the next ``Connections.flush`` sends."""
        self.unsent += msgpack.packb(message)

    def receive(self, token: str) -> Iterator[Message]:
        """Read what has come without waiting for more, and yield the whole messages in it.

        Raises:
            OSError: the client has closed the connection.
            PermissionError: it does not know the token.
            ValueError: it sends something else than messages.
        """
        data = self.sock.recv(RECEIVE_BYTES if self.trusted else LONGEST_TOKEN)
        if not data:
            raise ConnectionError("closed")
        self._unpacker.feed(data)
        for message in self._unpacker:
            if self.trusted:
                yield message
                continue
            given = message.encode() if isinstance(message, str) else b""
            if not (token and hmac.compare_digest(given, token.encode())):
                raise PermissionError("wrong token")
            self.trusted = True
            rest = self._unpacker.read_bytes(LONGEST_TOKEN)
            self._unpacker = msgpack.Unpacker(max_buffer_size=LONGEST_VALUE)
            self._unpacker.feed(rest)
            yield from self._unpacker
            return


class Connections:
    """All clients of a process that listens on a Unix socket."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        """Take over a socket that is bound; from now on it listens."""
        self._token = token
        self._listener = sock
        self._listener.setblocking(False)
        self._listener.listen(QUEUE)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._waker, woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(RECEIVE_BYTES))
        self._open: set[Connection] = set()
        self._numbers = itertools.count()

    def wake(self) -> None:
        """End a wait of ``receive``; any thread may call it."""
        with suppress(BlockingIOError):  # woken so often already
            self._waker.send(b"\0")

    def receive(self, *, wait: bool) -> Iterator[tuple[Connection, Message | None]]:
        """Read all messages there are; ``wait`` for one, or for ``wake``, if there are none.

        A message that is None says that this connection is gone.
        """
        for key, events in self._selector.select(None if wait else 0):
            if not isinstance(key.data, Connection):
                key.data()
                continue
            connection = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._send(connection)
                if events & selectors.EVENT_READ:
                    for message in connection.receive(self._token):
                        yield connection, message
            except BlockingIOError:
                continue
            except (OSError, ValueError, msgpack.UnpackException):
                self._drop(connection)
                yield connection, None

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            connection = Connection(sock, next(self._numbers))
            self._open.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def flush(self) -> None:
        """Send what there is to send, as far as the clients take it."""
        for connection in self._open:
            if connection.unsent:
                # Who has closed the connection is noticed by the next read.
                with suppress(OSError):
                    self._send(connection)

    def _send(self, connection: Connection) -> None:
        with suppress(BlockingIOError):
            sent = connection.sock.send(connection.unsent)
            del connection.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
