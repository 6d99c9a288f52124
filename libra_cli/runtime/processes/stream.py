"""One connection to a process, on which any number of calls are open at the same time.

What the messages are is in ``libra_cli.node.control``. Those that are sent in one turn of the event
loop leave together, and what a process does not take yet waits here.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NamedTuple, TypeAlias

import msgpack

from libra_cli.config.errors import NONSENSE, LibraError
from libra_cli.config.text import one_line
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.supervision.failures import MOST_CHARACTERS, words_of

CONNECT_S = 15.0
BEAT_S = 10.0
"""How often a process whose answer is awaited is asked whether it is there."""
PIECE_BYTES = 1 << 16
TOGETHER = 64
"""Pieces that are given to the transport at a time, which copies what it cannot send at once."""
LONGEST_ANSWER = 1 << 30
"""Bytes that are kept of an answer that has not come whole."""

Answer: TypeAlias = dict[str, Any]


class StreamErrors(NamedTuple):
    """What is raised of a kind of process: it failed, it refuses an order, or no answer comes."""

    failed: type[LibraError]
    refused: type[LibraError]
    unreachable: type[LibraError]


class Stream(asyncio.Protocol):
    """A connection to a process, and the calls on it that have no answer yet."""

    def __init__(self, who: str, token: str, errors: StreamErrors, *, silence_s: float) -> None:
        """``who`` names the process in messages.

        It is given up when it has said nothing, and taken nothing of what is sent, for
        ``silence_s`` while an answer is awaited.
        """
        self._who = who
        self._token = token
        self._errors = errors
        self._silence_s = silence_s
        self._transport: asyncio.Transport | None = None
        self._unpacker = msgpack.Unpacker(max_buffer_size=LONGEST_ANSWER)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._unsent: list[memoryview] = []
        self._is_full = False
        """Whether the transport has more than the process takes."""
        self._loop = asyncio.get_running_loop()
        self.heard_at = 0.0
        """When something last came, by the clock of the event loop; 0 if nothing ever has."""
        self._moved_at = 0.0
        self._left = 0
        """Bytes that the process had not taken at the last beat."""

    async def connect(self, endpoint: Endpoint) -> None:
        """Connect. Raises the error of a process that cannot be reached."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_unix_connection(lambda: self, endpoint.path)
        except OSError as error:
            raise self._errors.unreachable(f"{self._who}: {words_of(error)}") from error

    @property
    def closed(self) -> bool:
        """Whether it has been closed, by either side."""
        return self._transport is None or self._transport.is_closing()

    def begin(self, operation: str, order: Answer) -> tuple[int, asyncio.Future[Answer]]:
        """Send an order; return the number of the call and what will be its answer."""
        call, answer = self.tell(operation, order), self._loop.create_future()
        if not self._open:
            self._moved_at = self._loop.time()
        self._open[call] = answer
        return call, answer

    def tell(self, operation: str, order: Answer) -> int:
        """Send an order whose answer does not matter; return the number of the call."""
        call = next(self._numbers)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        data = memoryview(msgpack.packb([call, operation, order]))
        self._unsent += [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        return call

    def _flush(self) -> None:
        while self._unsent and self._transport is not None and not self._is_full:
            self._transport.write(b"".join(self._unsent[:TOGETHER]))
            del self._unsent[:TOGETHER]

    def forget(self, call: int) -> None:
        """Ignore the answer to this call, for which nobody waits any more."""
        self._open.pop(call, None)

    def close(self) -> None:
        """Close the connection; calls that are open fail."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    # -- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(msgpack.packb(self._token))
        self._loop.call_later(BEAT_S, self._beat)

    def pause_writing(self) -> None:
        """Keep what is sent until the transport has less."""
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._flush()

    def _beat(self) -> None:
        """Ask whether the process is there, and hang up if it has been silent for too long."""
        if self._transport is None:
            return
        now, left = self._loop.time(), self._transport.get_write_buffer_size()
        left += sum(map(len, self._unsent))
        if left < self._left:
            self._moved_at = now
        self._left = left
        if self._open and now - max(self._moved_at, self.heard_at) > self._silence_s:
            self._fail(self._errors.unreachable(f"{self._who}: silent for {self._silence_s:.0f} s"))
            self.close()
            return
        if self._open:
            self.tell("check", {})
        self._loop.call_later(BEAT_S, self._beat)

    def data_received(self, data: bytes) -> None:
        """Hand the answers over that are complete; after nonsense the connection is closed."""
        self.heard_at = self._loop.time()
        try:
            self._unpacker.feed(data)
            for call, outcome, answer in self._unpacker:
                self._answered(call, outcome, answer)
        except (msgpack.UnpackException, *NONSENSE) as error:
            said = f"{self._who} says what cannot be read: {words_of(error)}"
            self._fail(self._errors.failed(said))
            self.close()

    def _answered(self, call: int, outcome: str, answer: Answer) -> None:
        waiting = self._open.pop(call, None)
        if waiting is None or waiting.done():
            return
        if outcome == "done":
            waiting.set_result(answer)
        else:
            kind = self._errors.refused if outcome == "refused" else self._errors.failed
            said = one_line(f"{outcome}: {answer}"[:MOST_CHARACTERS])
            waiting.set_exception(kind(f"{self._who} {said}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every call that has no answer yet."""
        self._transport = None
        self._unsent.clear()
        reason = words_of(exc) if exc else "the connection was closed"
        self._fail(self._errors.unreachable(f"{self._who}: {reason}"))

    def _fail(self, error: LibraError) -> None:
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._open.clear()
