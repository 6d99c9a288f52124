"""The seam to a host: run a command, hold a line, put files, reach a port.

``ssh`` and ``local`` implement ``Transport``; nothing above them knows which it talks to. Every
call has a deadline, and raises ``HostError`` (or one of its kinds) that names the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

CONNECT_S = 15.0
OPEN_S = 20.0
COPY_S = 120.0
LINE_LIMIT = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def story(self) -> str:
        """The last thing it said, for an error message."""
        said = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return said.rpartition("\n")[2] or f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a client on this machine finds a port of a host's loopback."""

    kind: Literal["tcp", "unix"]
    address: str
    """``127.0.0.1:21000``, or the path of a socket."""
    port: int
    """The port on the host."""

    @property
    def url(self) -> str:
        """The base of HTTP URLs. With a socket only its path decides where a request goes."""
        return f"http://127.0.0.1:{self.port}"


class ByteStream(Protocol):
    """Standard input and output of a command that goes on."""

    @property
    def errors(self) -> str:
        """The end of what it has written to standard error so far."""

    async def readline(self) -> bytes:
        """The next line with its newline, or nothing at the end."""

    async def write(self, data: bytes) -> None:
        """Hand over all of it."""

    async def close(self) -> None:
        """Hang up. The command sees the end of its input."""


class Transport(Protocol):
    """One way to a host."""

    @property
    def target(self) -> str:
        """The host for people, in the form that ``ssh`` understands."""

    @property
    def home(self) -> str:
        """The user's home directory there; known once connected."""

    @property
    def default_python(self) -> str:
        """The interpreter for node code where the recipe names none; may begin with ``~/``."""

    async def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Connect, or connect again in place of a connection that was lost."""

    async def close(self) -> None:
        """End the connection and everything that goes through it, for good."""

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end."""

    async def open_stream(self, argv: Sequence[str]) -> ByteStream:
        """Start a command and talk to it."""

    async def put_tree(self, files: Mapping[str, bytes], directory: str) -> None:
        """Create a directory with these files. It appears complete or not at all; one that exists
        is left as it is."""

    async def get(self, path: str) -> bytes:
        """The contents of a file."""

    async def dial(self, port: int) -> Endpoint:
        """A way to a port of the host's loopback. It stays valid across reconnects, and each new
        connection to it needs the port to be open only then."""
