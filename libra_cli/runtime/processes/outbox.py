"""Writes messages to a process's stream, in order and by one task."""

from __future__ import annotations

import asyncio
import contextlib

from libra_cli.config.errors import HostError
from libra_cli.runtime.hosts.transport import ByteStream
from libra_cli.runtime.supervision.background import Background


class Outbox:
    """Messages that wait to be written to one stream. It belongs to one event loop.

    Nobody waits for what a process that is gone does not read: whoever reads the stream finds out.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._unsent = bytearray()
        self._more = asyncio.Event()
        self._sending = Background().start("writing to a process", self._send())

    def put(self, message: bytes) -> None:
        """Queue a message after those that wait; returns at once."""
        self._unsent += message
        self._more.set()

    async def close(self) -> None:
        """Send nothing more, and end the process's input."""
        self._sending.cancel()
        await asyncio.wait({self._sending})
        with contextlib.suppress(HostError):
            await self._stream.end_input()

    async def _send(self) -> None:
        with contextlib.suppress(HostError):
            while True:
                await self._more.wait()
                self._more.clear()
                data, self._unsent = bytes(self._unsent), bytearray()
                await self._stream.write(data)
