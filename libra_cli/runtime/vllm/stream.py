"""One connection to a rollout server, on which any number of calls are open at the same time.

What the messages are is in ``libra_cli.node.rollout.server``. Those that are sent in one turn of
the event loop leave in one piece.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeAlias

import msgpack

from libra_cli.config.errors import NONSENSE, ServerError
from libra_cli.config.text import one_line
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.http import describe
from libra_cli.runtime.rollout.connection import RequestRefused, ServerUnreachable
from libra_cli.runtime.supervision.failures import MOST_CHARACTERS, words_of

CONNECT_S = 15.0
LONGEST_ANSWER = 1 << 30
"""Bytes that are kept of an answer that has not come whole."""

Answer: TypeAlias = dict[str, Any]


class Stream(asyncio.Protocol):
    """The calls that are open on one connection. ``who`` is the server, for messages."""

    def __init__(self, who: str, token: str) -> None:
        self._who = who
        self._token = token
        self._transport: asyncio.Transport | None = None
        self._unpacker = msgpack.Unpacker(max_buffer_size=LONGEST_ANSWER)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def to(cls, who: str, endpoint: Endpoint, token: str) -> Stream:
        """Connect. Raises ServerUnreachable."""
        loop = asyncio.get_running_loop()

        def make() -> Stream:
            return cls(who, token)

        try:
            async with asyncio.timeout(CONNECT_S):
                _, stream = await loop.create_unix_connection(make, endpoint.path)
        except OSError as error:
            raise ServerUnreachable(f"{who}: {describe(error)}") from error
        return stream

    @property
    def closed(self) -> bool:
        """Whether it has been closed, by either side."""
        return self._transport is None or self._transport.is_closing()

    def begin(self, operation: str, order: Answer) -> tuple[int, asyncio.Future[Answer]]:
        """Send an order; return the number of the call and what will be its answer."""
        call, answer = self.tell(operation, order), self._loop.create_future()
        self._open[call] = answer
        return call, answer

    def tell(self, operation: str, order: Answer) -> int:
        """Send an order whose answer does not matter; return the number of the call."""
        call = next(self._numbers)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(msgpack.packb([call, operation, order]))
        return call

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def forget(self, call: int) -> None:
        """Nobody waits for this call any more."""
        self._open.pop(call, None)

    def close(self) -> None:
        """Close the connection; calls that are open fail."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    # -- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the token."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(msgpack.packb(self._token))

    def data_received(self, data: bytes) -> None:
        """Hand the answers over that are complete; after nonsense the connection is closed."""
        try:
            self._unpacker.feed(data)
            for call, outcome, answer in self._unpacker:
                self._answered(call, outcome, answer)
        except (msgpack.UnpackException, *NONSENSE) as error:
            self._fail(ServerError(f"{self._who} says what cannot be read: {words_of(error)}"))
            if self._transport is not None:
                self._transport.abort()

    def _answered(self, call: int, outcome: str, answer: Answer) -> None:
        waiting = self._open.pop(call, None)
        if waiting is None or waiting.done():
            return
        if outcome == "done":
            waiting.set_result(answer)
        else:
            kind = RequestRefused if outcome == "refused" else ServerError
            said = one_line(f"{outcome}: {answer}"[:MOST_CHARACTERS])
            waiting.set_exception(kind(f"{self._who} {said}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Every call that is open has failed."""
        self._transport = None
        reason = describe(exc) if exc else "the connection was closed"
        self._fail(ServerUnreachable(f"{self._who}: {reason}"))

    def _fail(self, error: ServerError) -> None:
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._open.clear()
