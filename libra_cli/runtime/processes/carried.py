"""Connections of a host that come over the stream of a process there, to an endpoint of loopback.

The host's side is ``envs.agents.carried``: nothing else has to be open between the two, and all of
it ends with the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from libra_cli.envs.agents.messages import Say
from libra_cli.runtime.supervision.background import Background

MOST_WAITING = 128 * 1024**2
"""Bytes of one connection that wait for the endpoint, which takes half of that in a request; a
connection with more is closed."""
_CHUNK = 64 * 1024


@dataclass(slots=True)
class _Inflow:
    """What has come of one connection and the endpoint has not read."""

    chunks: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    waiting: int = 0
    """How many bytes are in ``chunks``."""
    carrying: asyncio.Task[None] | None = None


class CarriedConnections:
    """The connections of one stream."""

    def __init__(
        self, node: str, port: int, say: Callable[[Say, int, Any], None], background: Background
    ) -> None:
        """Carry them to ``port`` of loopback; ``say`` sends a message back, ``background`` is the
        stream's and ends with it."""
        self._node = node
        self._port = port
        self._say = say
        self._background = background
        self._requests: dict[int, _Inflow] = {}
        self._newest = 0

    def take(self, say: Say, number: int, body: Any) -> None:
        """Take in a message about a connection."""
        if say == "data":
            self._receive(number, body)
        elif say == "close" and number in self._requests:
            self._requests[number].chunks.put_nowait(b"")

    def end(self) -> None:
        """End what is under way: the stream has ended."""
        for inflow in self._requests.values():
            inflow.chunks.put_nowait(b"")

    def _receive(self, number: int, data: bytes) -> None:
        """Bytes of a connection; the first of it opens one to the endpoint."""
        if number > self._newest:  # numbers grow; an older one that is not there is over
            self._newest = number
            inflow = self._requests[number] = _Inflow()
            inflow.carrying = self._background.start(
                f"carrying a request from {self._node}", self._carry(number, inflow)
            )
        if (known := self._requests.get(number)) is None:
            return
        known.waiting += len(data)
        known.chunks.put_nowait(data)
        if known.waiting > MOST_WAITING and known.carrying is not None:
            known.carrying.cancel()
            del self._requests[number]
            self._say("close", number, None)

    async def _carry(self, number: int, inflow: _Inflow) -> None:
        answers: asyncio.Task[None] | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            answers = self._background.start(
                f"carrying an answer to {self._node}", self._carry_back(number, reader)
            )
            with contextlib.closing(writer):
                while data := await inflow.chunks.get():
                    inflow.waiting -= len(data)
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass  # the endpoint has closed it
        finally:
            self._requests.pop(number, None)
            if answers is not None:
                answers.cancel()

    async def _carry_back(self, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                self._say("data", number, data)
        self._say("close", number, None)
