"""A port of this host's loopback, whose connections are carried to the controller over a stream.

    python -m libra_cli.envs.agents.carried

is such a port alone: it says ``ready`` with its number, and is there until its stdin ends. Whoever
connects reaches an endpoint of the controller, which asks for a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

from libra_cli.envs.agents.messages import MessageReader, Say, message

CHUNK = 64 * 1024


class CarriedPort:
    """The port and its connections, on one event loop."""

    def __init__(self, output: asyncio.StreamWriter) -> None:
        """Write to ``output`` what comes in, as messages of ``envs.agents.messages``."""
        self._output = output
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._opened = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen, and return the port's number."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def take(self, say: Say, number: int, body: Any) -> None:
        """Do what the controller says of a connection; one that is over is passed over."""
        match say:
            case "data" if number in self._connections:
                self._connections[number].write(body)
            case "close" if number in self._connections:
                self._connections.pop(number).close()
            case _:
                pass

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                # Not numbered before it speaks: the controller takes a number below one that it
                # has seen for a connection that is over.
                number = number or self._numbered(writer)
                self._output.write(message("data", number, data))
                await self._output.drain()
        if not number:
            writer.close()
            return
        self._output.write(message("close", number))
        if self._connections.pop(number, None) is not None:
            writer.close()

    def _numbered(self, writer: asyncio.StreamWriter) -> int:
        self._opened += 1
        self._connections[self._opened] = writer
        return self._opened


async def standard_streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return stdin and stdout; what a command or a library prints goes to stderr from now on."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out)
    return orders, asyncio.StreamWriter(transport, protocol, None, loop)


async def _serve() -> None:
    orders, output = await standard_streams()
    carried, reader = CarriedPort(output), MessageReader()
    output.write(message("ready", 0, await carried.open()))
    try:
        while data := await orders.read(CHUNK):
            for told in reader.feed(data):
                carried.take(*told)
    finally:
        carried.close()


def main() -> None:
    """Carry connections until the controller closes stdin."""
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
