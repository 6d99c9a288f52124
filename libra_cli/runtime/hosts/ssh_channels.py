"""Adapts paramiko's channels to asyncio, without a thread for each channel.

Reading  A channel has a descriptor that is readable while it has data; the event loop waits for
         that, and then ``recv`` does not block.
Sending  A send may block on the other side's window, on a rekey, on a dead link. So everything
         that sends, including a close, runs on the few threads of the transport (``Call``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import paramiko

from libra_cli.config.errors import HostError
from libra_cli.runtime.hosts.ssh_target import silent_s
from libra_cli.runtime.hosts.transport import OPEN_S, THINNEST_BYTES_S, Endpoint
from libra_cli.runtime.supervision.background import Background

log = logging.getLogger(__name__)

CHUNK = 64 * 1024
ERRORS_KEPT = 16 * 1024
SEND_S = 30.0
"""How long the other side may accept no more data."""

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""Run a blocking function on the transport's threads; its failures become ``HostLost``."""
Dial: TypeAlias = "Callable[[str], Awaitable[ChannelStream]]"
"""Open a channel to a Unix socket of the host."""


class ChannelStream:
    """An SSH channel as a ``ByteStream``, read on the event loop."""

    def __init__(self, channel: paramiko.Channel, call: Call) -> None:
        self._channel = channel
        self._call = call
        self._unread = bytearray()
        self._errors = bytearray()
        self._sending = threading.Lock()
        channel.settimeout(SEND_S)

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace").strip()

    @property
    def link_silent_s(self) -> float:
        """For how long the SSH connection has carried nothing to us, of any channel."""
        return silent_s(self._channel.get_transport())

    async def read(self) -> bytes:
        """Read the data that has come; empty at the end."""
        while True:
            # In this order, data that came before the end is in the buffer when the end is seen.
            has_ended = self._channel.eof_received or self._channel.closed
            self._keep_errors()
            if self._channel.recv_ready():
                return self._channel.recv(CHUNK)
            if has_ended:
                return b""
            await self._readable()

    async def readline(self) -> bytes:
        """Read the next line; at the end the rest of one."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            data = await self.read()
            if not data:
                end = searched - 1
                break
            self._unread += data
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line

    async def write(self, data: bytes) -> None:
        """Send all of ``data`` after what is being sent; one that fails closes the stream.

        Raises:
            HostLost: the other side took nothing for ``SEND_S``, or the connection broke.
        """
        limit_s = SEND_S + OPEN_S + len(data) / THINNEST_BYTES_S
        try:
            await self._call(self._send_all, data, timeout_s=limit_s)
        except HostError:
            await self.close()
            raise

    def _send_all(self, data: bytes) -> None:
        # paramiko sends a long message in parts, between which another thread's would get.
        with self._sending:
            try:
                self._channel.sendall(data)
            except BaseException:  # half of it may have gone, and nothing can follow that
                self._channel.close()
                raise

    async def end_input(self) -> None:
        await self._call(self._channel.shutdown_write)

    async def exit_code(self) -> int:
        """Wait for the command's exit code; -1 if the connection broke instead."""
        return int(await self._call(self._channel.recv_exit_status))

    async def close(self) -> None:
        with suppress(HostError):
            await self._call(self._channel.close)

    def _keep_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            self._errors += self._channel.recv_stderr(CHUNK)
            del self._errors[:-ERRORS_KEPT]

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = self._channel.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)


class Forward:
    """A Unix socket on this machine that leads to one of a host.

    Clients keep their connections to it across requests, so channels are opened rarely. While the
    host cannot be reached a new connection is closed at once, as if nothing listened there.
    """

    def __init__(self, path: Path, there: str, dial: Dial) -> None:
        self.endpoint = Endpoint(str(path))
        self._there = there
        self._dial = dial
        self._server: asyncio.Server | None = None
        self._connections = Background()

    async def open(self) -> None:
        """Listen on the Unix socket at ``endpoint``."""
        self._server = await asyncio.start_unix_server(self._accept, self.endpoint.path)

    async def close(self) -> None:
        """Stop listening, close all connections, and remove the socket."""
        if self._server is not None:
            self._server.close()
        await self._connections.close()
        Path(self.endpoint.path).unlink(missing_ok=True)  # noqa: ASYNC240 - one system call

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what = f"carrying a connection to {self._there}"
        self._connections.start(what, self._join(reader, writer))

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await self._dial(self._there)
        except HostError as error:
            log.info("%s", error)  # a socket where nobody listens yet is usual
            writer.close()
            return
        what = f"carrying what is said to {self._there}"
        upward = self._connections.start(what, _carry_up(reader, channel))
        try:
            await _carry_down(channel, writer)
        finally:
            upward.cancel()
            writer.close()
            await channel.close()


async def _carry_up(reader: asyncio.StreamReader, channel: ChannelStream) -> None:
    with suppress(HostError, ConnectionError):
        while data := await reader.read(CHUNK):
            await channel.write(data)
        await channel.end_input()


async def _carry_down(channel: ChannelStream, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await channel.read():
            writer.write(data)
            await writer.drain()
