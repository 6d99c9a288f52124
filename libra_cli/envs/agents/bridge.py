"""Carries the connections to a listening socket on to an address, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

MOST = 256
"""Connections that are carried at the same time. One that comes when there are as many is closed:
each takes a port of this machine and a file of the controller, on which all episodes depend."""
_CHUNK = 64 * 1024


class Bridge:
    """Connects whoever connects to a socket with a port of this machine's loopback.

    Use it in a ``with``: what is connected is closed at its end, the socket too.
    """

    def __init__(self, listener: socket.socket, port: int) -> None:
        self._listener = listener
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._open = 0
        self._thread = threading.Thread(target=self._serve, name="libra-bridge", daemon=True)

    def __enter__(self) -> Bridge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _serve(self) -> None:
        # At its end the runner cancels what is still being carried.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_over())

    async def _until_over(self) -> None:
        self._listener.setblocking(False)
        server = await asyncio.start_server(self._connected, sock=self._listener)
        try:
            await self._over.wait()
        finally:
            server.close()

    async def _connected(
        self, asking: asyncio.StreamReader, answered: asyncio.StreamWriter
    ) -> None:
        if self._open >= MOST:
            answered.close()
            return
        self._open += 1
        try:
            await self._carried(asking, answered)
        finally:
            self._open -= 1

    async def _carried(self, asking: asyncio.StreamReader, answered: asyncio.StreamWriter) -> None:
        # Python 3.11's stream server logs a connection that was cancelled as an error.
        expected = contextlib.suppress(OSError, asyncio.CancelledError)
        with contextlib.closing(answered), expected:
            answering, asked = await asyncio.open_connection("127.0.0.1", self._port)
            with contextlib.closing(asked):
                await asyncio.gather(_carry(asking, asked), _carry(answering, answered))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read, and the end of it."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
