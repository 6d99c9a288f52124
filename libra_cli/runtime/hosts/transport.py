"""The protocol of a transport to a host: run a command, open a stream, put files, reach a socket.

``ssh`` and ``local`` implement ``Transport``; their callers do not know which one they use. Every
call has a deadline, and raises a ``HostError`` (or a subclass) that names the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CONNECT_S = 15.0
OPEN_S = 20.0
COPY_S = 120.0
THINNEST_BYTES_S = 1e4
"""Bytes a second of the thinnest link that is worth waiting for; a gigabyte takes a day."""
LINE_LIMIT = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code and the output of a command that has ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def last_words(self) -> str:
        """The last line of its output, for an error message."""
        output = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return output.rpartition("\n")[2] or f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A Unix socket on this machine that leads to one of a host."""

    path: str


class ByteStream(Protocol):
    """Standard input and output of a command that runs on a host."""

    @property
    def errors(self) -> str:
        """The end of its standard error so far."""

    @property
    def link_silent_s(self) -> float:
        """Seconds since anything came on the connection that it shares; infinite if it has none."""

    async def read(self) -> bytes:
        """Read what has come; empty at the end. Not to be mixed with ``readline``."""

    async def readline(self) -> bytes:
        """Read the next line with its newline; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Write all of ``data`` to its standard input; raises HostLost if it reads no more."""

    async def end_input(self) -> None:
        """Let the command see the end of its input, and go on reading."""

    async def exit_code(self) -> int:
        """Wait for the command's exit code; -1 if the connection broke instead."""

    async def close(self) -> None:
        """Close the stream. The command sees the end of its input."""


class Transport(Protocol):
    """A way to run commands on one host."""

    @property
    def target(self) -> str:
        """The host's name for messages, in the form that ``ssh`` understands."""

    @property
    def warnings(self) -> Sequence[str]:
        """What is wrong on the way there without forbidding to connect; known once connected."""

    @property
    def home(self) -> str:
        """The user's home directory there; known once connected."""

    @property
    def default_python(self) -> str:
        """The interpreter for node code where the recipe names none; may begin with ``~/``."""

    async def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Connect, or replace a connection that was lost."""

    async def close(self) -> None:
        """End the connection and everything that goes through it, finally."""

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        """Run a command and return its output and exit code; raises HostLost at the deadline."""

    async def open_stream(self, argv: Sequence[str]) -> ByteStream:
        """Start a command, and return its input and output."""

    async def put_tree(self, files: Mapping[str, bytes], directory: str) -> None:
        """Create a directory with these files, by name and content.

        It appears complete or not at all; one that exists is left as it is.
        """

    async def append(self, path: str, data: bytes) -> None:
        """Write data at the end of a file, which is made if it is not there."""

    async def get(self, path: str) -> bytes:
        """Return the content of a file."""

    async def fetch(self, path: str, target: Path) -> None:
        """Copy a file of any size from the host to this machine."""

    async def dial(self, path: str) -> Endpoint:
        """Return an endpoint that leads to a Unix socket of the host.

        It stays valid when the transport connects again. Something must listen on the socket only
        when a client connects.
        """

    async def reach(self, path: str) -> None:
        """Return if something listens on a Unix socket of the host and can be reached there.

        Raises:
            HostError: it cannot.
        """
