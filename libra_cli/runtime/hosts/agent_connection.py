"""The line to one agent: requests and answers by number, events, and a pulse.

A request outlives the connection it was sent on. If the line breaks before the answer has come, the
request waits, goes out again on the next connection, and fails only at its own deadline. Every
operation of the agent may therefore be asked twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from libra_cli.config.errors import HostError, HostLost, LibraError, ProcessError, WeightsError
from libra_cli.runtime.hosts.transport import ByteStream

MISSED_BEATS = 3
HELLO_S = 30.0

Message: TypeAlias = Mapping[str, Any]

_BLAME: dict[str, type[LibraError]] = {"start": ProcessError, "weights": WeightsError}


class AgentConnection:
    """Asks one agent. ``hear`` is called with each event."""

    def __init__(self, name: str, hear: Callable[[Message], None]) -> None:
        self._name = name
        self._hear = hear
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Message, asyncio.Future[Any]]] = {}
        self._stream: ByteStream | None = None
        self._heard = 0.0
        self._over: LibraError | None = None

    async def join(self, stream: ByteStream, hello: Message) -> Any:
        """Use a new connection. Returns the agent's answer to hello; then repeats what waits."""
        try:
            async with asyncio.timeout(HELLO_S):
                await stream.write(_encode({"id": 0, "op": "hello", **hello}))
                answer = await self._first_answer(stream)
                self._stream = stream
                for message, _ in [*self._waiting.values()]:
                    await stream.write(_encode(message))
        except BaseException as error:
            self._stream = None
            await stream.close()
            if isinstance(error, TimeoutError):
                reason = f"{self._name}: the agent did not answer in {HELLO_S:g} s"
                raise HostLost(reason) from error
            raise
        return answer

    async def ask(self, operation: str, *, timeout_s: float, **arguments: object) -> Any:
        """The result of an operation. Waits out a loss of the line, up to the deadline."""
        if self._over is not None:
            raise self._over
        number = next(self._numbers)
        message = {"id": number, "op": operation, **arguments}
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = message, answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(message)
                return await answer
        except TimeoutError as error:
            state = "" if self._stream else ", and the connection is lost"
            raise HostLost(
                f"{self._name}: {operation}: no answer within {timeout_s:g} s{state}"
            ) from error
        finally:
            del self._waiting[number]

    async def until_lost(self, pulse_s: float) -> str:
        """Carry answers and events until the connection is gone; the reason."""
        assert self._stream is not None, "joined first"
        stream = self._stream
        self._heard = asyncio.get_running_loop().time()
        halves = self._listen(stream), self._beat(stream, pulse_s)
        tasks = [asyncio.create_task(half) for half in halves]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            self._stream = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await stream.close()

    def fail(self, error: LibraError) -> None:
        """The line will not come back: nobody has to wait for an answer any more."""
        self._over = error
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    async def _send(self, message: Message) -> None:
        if self._stream is None:
            return
        with suppress(HostLost):  # the listener notices too; it goes out again after the loss
            await self._stream.write(_encode(message))

    async def _first_answer(self, stream: ByteStream) -> Any:
        while line := await stream.readline():
            message = _decode(line)
            if message.get("id") == 0:
                return self._result(message)
        raise HostError(f"{self._name}: no agent there: {stream.errors or 'it ended at once'}")

    async def _listen(self, stream: ByteStream) -> str:
        try:
            while line := await stream.readline():
                self._heard = asyncio.get_running_loop().time()
                self._take(_decode(line))
        except ValueError as error:
            return f"the agent sends a line without an end: {error}"
        return f"the agent hung up {stream.errors}".strip()

    def _take(self, message: Message) -> None:
        if "event" in message:
            self._hear(message)
        elif (entry := self._waiting.get(message.get("id", 0))) and not entry[1].done():
            self._settle(entry[1], message)

    def _settle(self, answer: asyncio.Future[Any], message: Message) -> None:
        try:
            answer.set_result(self._result(message))
        except LibraError as error:
            answer.set_exception(error)

    def _result(self, message: Message) -> Any:
        if message["ok"]:
            return message["result"]
        raise _BLAME.get(message["kind"], HostError)(f"{self._name}: {message['error']}")

    async def _beat(self, stream: ByteStream, pulse_s: float) -> str:
        """Ask for a sign of life now and then: it keeps the lease, and finds a dead connection."""
        loop = asyncio.get_running_loop()
        patience_s = MISSED_BEATS * pulse_s
        while loop.time() - self._heard < patience_s:
            try:
                async with asyncio.timeout(patience_s):
                    await stream.write(_encode({"op": "ping"}))
            except (TimeoutError, HostLost):
                break
            await asyncio.sleep(pulse_s)
        return f"nothing heard for {loop.time() - self._heard:.0f} s"


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _decode(line: bytes) -> Message:
    """A message of the agent's, or an empty one: a login script may print what it likes."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
