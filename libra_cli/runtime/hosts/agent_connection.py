"""The connection to one agent, which carries numbered requests, answers, events and pings.

A request outlives the stream it was sent on. If the stream breaks before the answer has come, the
request waits, is sent again on the next stream, and fails only at its own deadline. So an agent
may receive every request twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from libra_cli.config.errors import (
    NONSENSE,
    HostError,
    HostLost,
    LibraError,
    ProcessError,
    WeightsError,
)
from libra_cli.runtime.hosts.transport import ByteStream
from libra_cli.runtime.supervision.answers import understood
from libra_cli.runtime.supervision.failures import MOST_CHARACTERS, words_of

MISSED_PINGS = 3
BUSY_SHARE = 0.5
"""Share of the lease by which an answer may be late that waits behind other data on a thin link."""
HELLO_S = 30.0

Message: TypeAlias = Mapping[str, Any]

_ERRORS: dict[str, type[LibraError]] = {"start": ProcessError, "weights": WeightsError}


class AgentConnection:
    """Sends requests to one agent. ``on_event`` is called with each of its events."""

    def __init__(self, name: str, on_event: Callable[[Message], None]) -> None:
        self._name = name
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Message, asyncio.Future[Any]]] = {}
        self._stream: ByteStream | None = None
        self._heard = 0.0
        self._unanswered: deque[float] = deque()
        """When each ping was sent that has no answer yet; answers come in their order."""
        self._failure: LibraError | None = None

    async def attach(
        self, stream: ByteStream, hello: Message, *, admit: Callable[[Message], None]
    ) -> Any:
        """Use a new stream: say hello, repeat the requests that wait, and return the answer.

        ``admit`` looks at the answer first, and raises if it is not to be used.

        Raises:
            HostLost: the agent did not answer within ``HELLO_S``.
            HostError: the agent refused, or there is none.
        """
        try:
            async with asyncio.timeout(HELLO_S):
                await stream.write(_encode({"id": 0, "op": "hello", **hello}))
                answer = await self._first_answer(stream)
                admit(answer)
                self._heard = asyncio.get_running_loop().time()
                self._stream = stream
                for message, waiting in [*self._waiting.values()]:
                    if not waiting.done():
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
        """Return an operation's result, also across a lost stream, up to the deadline.

        Raises:
            HostLost: no answer came in time, or the connection was given up.
            LibraError: the agent refused; its kind of error selects the class.
        """
        if self._failure is not None:
            raise self._failure
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

    async def until_lost(self, ping_interval_s: float, lease_s: float) -> str:
        """Carry answers and events until the stream breaks; return the reason."""
        assert self._stream is not None, "joined first"
        stream = self._stream
        self._unanswered.clear()
        self._heard = asyncio.get_running_loop().time()
        halves = self._listen(stream), self._ping(stream, ping_interval_s, lease_s)
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

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard from the agent."""
        return asyncio.get_running_loop().time() - self._heard

    @property
    def behind_s(self) -> float:
        """For how long the oldest ping without an answer has waited for it."""
        now = asyncio.get_running_loop().time()
        return now - self._unanswered[0] if self._unanswered else 0.0

    def restore(self) -> None:
        self._failure = None

    def fail(self, error: LibraError) -> None:
        """Fail all requests with ``error``, and those to come until ``restore``."""
        self._failure = error
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    async def _send(self, message: Message) -> None:
        if self._stream is None:
            return
        with suppress(HostLost):  # the listener notices too; the request is sent again later
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
        except NONSENSE as error:
            return f"the agent says what cannot be read: {words_of(error)}"
        return f"the agent hung up {stream.errors}".strip()

    def _take(self, message: Message) -> None:
        if "event" in message:
            self._on_event(message)
        elif message.get("id") is None and self._unanswered:
            self._unanswered.popleft()
        elif (entry := self._waiting.get(message.get("id", 0))) and not entry[1].done():
            self._settle(entry[1], message)

    def _settle(self, answer: asyncio.Future[Any], message: Message) -> None:
        try:
            answer.set_result(self._result(message))
        except LibraError as error:
            answer.set_exception(error)

    def _result(self, message: Message) -> Any:
        with understood(HostError, f"{self._name}: the agent's answer"):
            if message["ok"]:
                return message["result"]
            kind = _ERRORS.get(message["kind"], HostError)
            raise kind(f"{self._name}: {str(message['error'])[:MOST_CHARACTERS]}")

    async def _ping(self, stream: ByteStream, ping_interval_s: float, lease_s: float) -> str:
        """Ping the agent at intervals, which renews the lease and finds a dead connection.

        Answers may wait behind a batch that is sent or a file that is fetched on the same link: as
        long as that brings anything, they are waited for longer.
        """
        silence_limit_s = MISSED_PINGS * ping_interval_s
        busy_limit_s = max(silence_limit_s, BUSY_SHARE * lease_s)
        while (
            min(self.silent_s, stream.link_silent_s) < silence_limit_s
            and self.silent_s < busy_limit_s
        ):
            try:
                async with asyncio.timeout(silence_limit_s):
                    self._unanswered.append(asyncio.get_running_loop().time())
                    await stream.write(_encode({"op": "ping"}))
            except (TimeoutError, HostLost):
                break
            before = _clock_that_never_stops()
            await asyncio.sleep(ping_interval_s)
            passed_s = _clock_that_never_stops() - before
            if passed_s > ping_interval_s + silence_limit_s:
                return f"this controller did not run for {passed_s:.0f} s"
        return f"nothing heard for {self.silent_s:.0f} s"


def _clock_that_never_stops() -> float:
    """Seconds since boot, those that the machine slept among them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _decode(line: bytes) -> Message:
    """Parse a message of the agent; empty for other lines, which a login script may print."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
