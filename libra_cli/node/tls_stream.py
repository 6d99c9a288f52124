"""The client's end of a TLS connection, which takes from the network in large blocks.

``ssl.SSLSocket`` takes a record of at most 16 KiB at a time, with two system calls for each. Here a
block of many records is received with one call, and decrypted to where it is wanted. Standard
library only.
"""

from __future__ import annotations

import io
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

BLOCK_BYTES = 1 << 17
"""Received at a time. Smaller blocks take more calls, larger ones leave the processor's cache
before they are decrypted: 128 KiB took 0.75 seconds of a core a GB, 32 KiB 0.98, 1 MiB 0.83 (one
run each)."""
T = TypeVar("T")


class TlsStream:
    """A TLS connection to a server, with those methods of a socket that ``http.client`` needs."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str) -> None:
        """Verify each other; ``name`` is the one in the server's certificate.

        Raises:
            OSError: the other side is not the one that is meant, refuses, or is away.
        """
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._files, self._is_closed = 0, False
        self._await(self._tls.do_handshake)
        self._send()

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as what has come suffices; wait only for its first bytes.

        Returns how many bytes there are; 0 when the other side has hung up.

        Raises:
            OSError: nothing came in time, or the connection broke.
        """
        count = self._await(lambda: self._decrypted(buffer))
        try:
            while count < len(buffer) and (self._tls.pending() or self._incoming.pending):
                if not (more := self._decrypted(buffer[count:])):
                    break
                count += more
        except ssl.SSLWantReadError:  # the rest of a record is on its way
            pass
        return count

    def sendall(self, data: ReadableBuffer) -> None:
        """Encrypt and send all of ``data``; raises OSError."""
        self._tls.write(data)
        self._send()

    def makefile(self, _mode: str) -> io.BufferedReader:
        """A file that reads from here. The connection stays until both are closed, since an answer
        that is the last one is read after its connection was closed."""
        self._files += 1
        return io.BufferedReader(_Reader(self))

    def settimeout(self, seconds: float) -> None:
        """Set how long a call may wait for the other side."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Hang up, as soon as no file reads from here."""
        self._is_closed = True
        if not self._files:
            self._sock.close()

    def file_closed(self) -> None:
        """Count a file of ``makefile`` as closed; a closed connection ends with its last file."""
        self._files -= 1
        if self._is_closed:
            self.close()

    def _decrypted(self, buffer: memoryview) -> int:
        """Decrypt one record, as far as there is room; how many bytes that gave."""
        count: Any = self._tls.read(len(buffer), cast(bytearray, buffer))
        return int(count)

    def _await(self, step: Callable[[], T]) -> T:
        """Take a step of the protocol as soon as enough has come for it."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._send()
                if count := self._sock.recv_into(self._block):
                    self._incoming.write(self._block[:count])
                else:
                    self._incoming.write_eof()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._sock.sendall(self._outgoing.read())


class _Reader(io.RawIOBase):
    def __init__(self, stream: TlsStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._stream.file_closed()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        try:
            return self._stream.readinto(memoryview(buffer).cast("B"))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0
