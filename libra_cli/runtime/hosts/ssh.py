"""The transport to a host over SSH, with paramiko behind an asyncio interface.

There is one connection for each host (and one for each jump host before it). Calls that block run
on a few threads; reading waits on descriptors. A lost connection is not repaired here: calls raise
``HostLost`` until somebody calls ``connect`` again. Endpoints given out by ``dial`` stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import random
import secrets
import shlex
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

import paramiko

from libra_cli.config.errors import HostError, HostLost
from libra_cli.runtime.hosts import ssh_target
from libra_cli.runtime.hosts.owned_directory import OwnedDirectory
from libra_cli.runtime.hosts.ssh_channels import ChannelStream, Forward
from libra_cli.runtime.hosts.transport import CONNECT_S, COPY_S, OPEN_S, CommandResult, Endpoint

T = TypeVar("T")

THREADS = 8
SESSIONS = 3
"""Sessions of one connection at a time: the agent's, a command's and a copy's."""
BUSY_PAUSES_S = (1.0, 2.0, 4.0)
PREFETCHED = 256
"""Requests of 32 KiB under way while a file is copied; all at once would fill the memory."""
FETCH_S = 3600.0
"""The longest copy of one file: of 5 GB, 1.4 MB/s are enough."""
WINDOW = 16 * 1024**2
"""Bytes that the host may send on a channel before it hears from us. Acknowledgements are sent by
the event loop itself, so they should be rare."""

# It logs every lost connection with a traceback, and our own errors say what matters.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def _is_no_refused_channel(record: logging.LogRecord) -> bool:
    """A socket that does not listen yet refuses four times a second while a server starts; whoever
    asked is told by an exception."""
    return not record.getMessage().startswith("Secsh channel")


logging.getLogger("paramiko.transport").addFilter(_is_no_refused_channel)


class SshTransport:
    """Reaches a host over SSH, through jump hosts if need be, as a ``Transport``."""

    default_python = "~/.libra/venv/bin/python"

    def __init__(
        self,
        host: str,
        *,
        user: str | None = None,
        port: int | None = None,
        identity: str | None = None,
        jump: str | None = None,
        config: str = "~/.ssh/config",
        known_hosts: str | None = None,
    ) -> None:
        self.target = f"{user}@{host}" if user else host
        self.home = ""
        self._ssh_target = ssh_target.SshTarget(host, user, port, identity, jump)
        self._config = config
        self._known_hosts = known_hosts
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"ssh {host}")
        self._is_closed = False
        self._clients: list[paramiko.SSHClient] = []
        self._guard = threading.Lock()
        self._attempt = 0
        """Counts calls of ``connect`` and ``close``: a thread whose attempt has been given up
        closes the connection that it made."""
        self._forwards: dict[str, Forward] = {}
        self._sockets: OwnedDirectory | None = None
        self.warnings: Sequence[str] = ()
        """What is wrong here without forbidding to connect; known once connected."""

    async def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Connect through every hop and look up the home directory.

        Raises:
            HostKeyError: a hop's key is unknown or has changed.
            HostError: a hop cannot be reached or refuses the login; the message names it.
        """
        attempt = await self._hang_up()
        # Each step of each hop has the deadline; the outer one is for steps that have none.
        await self._call(self._connect, attempt, timeout_s, timeout_s=3 * timeout_s)
        self.home = await self._call(self._find_home)

    async def close(self) -> None:
        """Disconnect for good, and remove the sockets that ``dial`` has made."""
        for forward in self._forwards.values():
            await forward.close()
        self._forwards.clear()
        self._is_closed = True
        await self._hang_up()
        self._threads.shutdown(wait=False)
        if self._sockets is not None:
            self._sockets.remove()

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        """Run a command to its end. A timeout closes its channel and does not kill it.

        Raises:
            HostLost: it did not end within ``timeout_s``, or the connection broke.
        """
        async with self._deadline(argv[0], timeout_s), self._session(argv) as stream:
            # Both at once: a command may write a lot before it has read everything.
            writing = asyncio.create_task(_feed(stream, stdin))
            stdout = bytearray()
            while data := await stream.read():
                stdout += data
            await writing
            exit_code = await stream.exit_code()
        if exit_code < 0:
            raise HostLost(f"{self.target}: {argv[0]}: the connection broke")
        return CommandResult(exit_code, bytes(stdout), stream.errors.encode())

    async def open_stream(self, argv: Sequence[str]) -> ChannelStream:
        channel = await self._call(self._execute, shlex.join(argv), timeout_s=OPEN_S)
        return ChannelStream(channel, self._call)

    async def put_tree(self, files: Mapping[str, bytes], directory: str) -> None:
        """Upload files over SFTP into a new directory, which appears complete."""
        await self._call(self._put_tree, files, directory, timeout_s=COPY_S)

    async def append(self, path: str, data: bytes) -> None:
        """Write data at the end of a file over SFTP, which is far faster than a command's input."""
        await self._call(self._append, path, data, timeout_s=COPY_S)

    async def get(self, path: str) -> bytes:
        """Read a file over SFTP, which may take ``COPY_S`` seconds."""
        return await self._call(self._get, path, timeout_s=COPY_S)

    async def fetch(self, path: str, target: Path) -> None:
        """Copy a file over SFTP, however long it takes."""
        await self._call(self._fetch, path, target, timeout_s=FETCH_S)

    async def dial(self, path: str) -> Endpoint:
        """Return a socket in a private directory that leads to the host's."""
        if path not in self._forwards:
            self._sockets = self._sockets or OwnedDirectory("sockets")
            here = self._sockets.path / f"{len(self._forwards)}.sock"
            forward = self._forwards[path] = Forward(here, path, self._open_socket)
            await forward.open()
        return self._forwards[path].endpoint

    async def reach(self, path: str) -> None:
        """Connect to a Unix socket of the host, and hang up.

        Raises:
            HostError: nothing listens there, or its sshd does not forward to it, which looks alike.
        """
        try:
            stream = await self._open_socket(path)
        except HostError as error:
            raise HostError(
                f"{self.target}: its sshd does not forward to Unix sockets: {error}",
                hint="AllowStreamLocalForwarding yes, in the host's sshd_config (OpenSSH 6.7)",
            ) from error
        await stream.close()

    # -- in the event loop ---------------------------------------------------------------------

    async def _call(
        self, function: Callable[..., T], *arguments: object, timeout_s: float = OPEN_S
    ) -> T:
        """Run a blocking function on a thread of this transport, with a deadline."""
        name = function.__name__.strip("_").replace("_", " ")
        if self._is_closed:
            raise HostLost(f"{self.target}: {name}: closed")
        loop = asyncio.get_running_loop()
        async with self._deadline(name, timeout_s):
            try:
                return await loop.run_in_executor(self._threads, function, *arguments)
            except (paramiko.SSHException, EOFError, OSError) as error:
                reason = f"{name}: {error}" if str(error) else name
                raise HostLost(f"{self.target}: the connection broke: {reason}") from error

    @asynccontextmanager
    async def _deadline(self, doing: str, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise HostLost(f"{self.target}: {doing}: no answer within {timeout_s:g} s") from error

    @asynccontextmanager
    async def _session(self, argv: Sequence[str]) -> AsyncIterator[ChannelStream]:
        stream = await self.open_stream(argv)
        try:
            yield stream
        finally:
            await stream.close()

    async def _open_socket(self, path: str) -> ChannelStream:
        return ChannelStream(await self._call(self._open_channel, path), self._call)

    async def _hang_up(self) -> int:
        with self._guard:
            self._attempt += 1
            clients, self._clients = self._clients, []
            attempt = self._attempt
        # Not on our own threads, which a dead connection may block: closing it frees them.
        await asyncio.to_thread(ssh_target.close, clients)
        return attempt

    # -- on a thread ---------------------------------------------------------------------------

    def _connect(self, attempt: int, timeout_s: float) -> None:
        route = ssh_target.resolve_route(self._ssh_target, self._config, self._known_hosts)
        self.warnings = [
            f"{key} can be read by others than you, and ssh would refuse it: chmod 600 {key}"
            for key in ssh_target.readable_keys(route)
        ]
        clients = _connected(route, timeout_s)
        with self._guard:
            if attempt == self._attempt:
                self._clients = clients
                return
        ssh_target.close(clients)

    def _wire(self) -> ssh_target.UnixForwardingTransport:
        with self._guard:
            if not self._clients:
                raise HostLost(f"{self.target}: not connected")
            return ssh_target.transport_of(self._clients[-1])

    def _execute(self, command: str) -> paramiko.Channel:
        try:
            channel = self._wire().open_session(window_size=WINDOW, timeout=OPEN_S)
        except paramiko.ChannelException as error:
            raise self._no_session(error) from error
        channel.exec_command(command.encode())
        return channel

    def _no_session(self, error: paramiko.ChannelException) -> HostError:
        return HostError(
            f"{self.target}: its sshd opens no further session on one connection ({error.text})",
            hint=f"MaxSessions 10 (its default; {SESSIONS} are needed), in its sshd_config",
        )

    def _open_channel(self, path: str) -> paramiko.Channel:
        return self._wire().open_unix(path, WINDOW, timeout=OPEN_S)

    def _sftp(self) -> paramiko.SFTPClient:
        try:
            client = paramiko.SFTPClient.from_transport(self._wire())
        except paramiko.ChannelException as error:
            raise self._no_session(error) from error
        except (paramiko.SSHException, EOFError) as error:
            raise HostError(
                f"{self.target}: it does not speak SFTP ({error})",
                hint="Subsystem sftp internal-sftp, in the host's sshd_config",
            ) from error
        assert client is not None, "only an inactive transport gives none"
        return client

    def _find_home(self) -> str:
        with self._sftp() as sftp:
            return sftp.normalize(".")

    def _get(self, path: str) -> bytes:
        with self._sftp() as sftp:
            try:
                with sftp.open(path, "rb") as file:
                    file.prefetch()
                    return file.read()
            except FileNotFoundError as error:
                raise HostError(f"{self.target}: {path}: no such file") from error

    def _append(self, path: str, data: bytes) -> None:
        with self._sftp() as sftp:
            try:
                with sftp.open(path, "ab") as file:
                    file.set_pipelined(True)
                    file.write(data)
            except OSError as error:  # a lost connection is another exception
                raise HostError(f"{self.target}: cannot write {path}: {error}") from error

    def _fetch(self, path: str, target: Path) -> None:
        with self._sftp() as sftp:
            try:
                sftp.get(path, str(target), max_concurrent_prefetch_requests=PREFETCHED)
            except FileNotFoundError as error:
                raise HostError(f"{self.target}: {path}: no such file") from error

    def _put_tree(self, files: Mapping[str, bytes], directory: str) -> None:
        with self._sftp() as sftp:
            if _exists(sftp, directory):
                return
            draft = f"{directory}.{secrets.token_hex(4)}"
            try:
                _upload(sftp, files, draft)
                sftp.posix_rename(draft, directory)
            except OSError as error:
                _discard(sftp, files, draft)
                if not _exists(sftp, directory):  # else another process has put it there
                    raise HostError(f"{self.target}: cannot write {draft}: {error}") from error


def _connected(route: Sequence[ssh_target.Hop], timeout_s: float) -> list[paramiko.SSHClient]:
    """Connect, and again after a while to a hop that takes no more connections just now."""
    for pause_s in BUSY_PAUSES_S:
        try:
            return ssh_target.connect(route, timeout_s)
        except ssh_target.HostBusy:
            # Many hosts begin at once behind one jump host: not at the same moments again.
            time.sleep(pause_s * random.uniform(0.5, 1.5))
    return ssh_target.connect(route, timeout_s)


def _exists(sftp: paramiko.SFTPClient, path: str) -> bool:
    try:
        sftp.stat(path)
    except FileNotFoundError:
        return False
    return True


def _upload(sftp: paramiko.SFTPClient, files: Mapping[str, bytes], directory: str) -> None:
    made: set[str] = set()
    for name, data in files.items():
        path = posixpath.join(directory, name)
        _make_directories(sftp, posixpath.dirname(path), made)
        with sftp.open(path, "wb") as file:
            file.set_pipelined(True)
            file.write(data)


def _make_directories(sftp: paramiko.SFTPClient, path: str, made: set[str]) -> None:
    if path in made or _exists(sftp, path):
        return
    _make_directories(sftp, posixpath.dirname(path), made)
    try:
        sftp.mkdir(path, 0o700)
    except OSError:
        if not _exists(sftp, path):  # else another process has made it
            raise
    made.add(path)


def _discard(sftp: paramiko.SFTPClient, files: Iterable[str], directory: str) -> None:
    folders = {directory}
    for name in files:
        folders |= {posixpath.join(directory, str(one)) for one in PurePosixPath(name).parents}
        with suppress(OSError):
            sftp.remove(posixpath.join(directory, name))
    for folder in sorted(folders, key=len, reverse=True):
        with suppress(OSError):
            sftp.rmdir(folder)


async def _feed(stream: ChannelStream, data: bytes) -> None:
    with suppress(HostError):  # a command need not read what it is given
        await stream.write(data)
        await stream.end_input()
