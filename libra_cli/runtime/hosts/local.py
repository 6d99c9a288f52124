"""The transport to the controller's own machine, with subprocesses and plain files."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from libra_cli.config.errors import HostError, HostLost
from libra_cli.runtime.hosts.transport import CONNECT_S, LINE_LIMIT, CommandResult, Endpoint

ERRORS_KEPT = 16 * 1024
LAST_WORDS_S = 5.0
READ_BYTES = 256 * 1024


class LocalTransport:
    """This machine as a host; its commands survive a Ctrl-C that is meant for the controller."""

    target = "local"
    default_python = sys.executable
    warnings: Sequence[str] = ()

    @property
    def home(self) -> str:
        """The home directory of the user who runs libra."""
        return str(Path.home())

    async def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Do nothing, since this machine is always there."""

    async def close(self) -> None:
        """Do nothing, since there is no connection."""

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        """Run a command to its end; it is killed if it does not come in time."""
        try:
            process = await _spawn(argv)
        except FileNotFoundError as error:  # what a shell makes of it
            return CommandResult(127, b"", f"{argv[0]}: {error.strerror}".encode())
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate(stdin)
        except TimeoutError as error:
            raise HostLost(f"local: {argv[0]}: no answer within {timeout_s:g} s") from error
        finally:
            _kill(process)
        return CommandResult(process.returncode or 0, stdout, stderr)

    async def open_stream(self, argv: Sequence[str]) -> ProcessStream:
        return ProcessStream(await _spawn(argv))

    async def put_tree(self, files: Mapping[str, bytes], directory: str) -> None:
        """Write files into a new directory, which appears complete."""
        try:
            await asyncio.to_thread(_put_tree, files, Path(directory))
        except OSError as error:
            raise HostError(f"local: {error.filename}: {error.strerror}") from error

    async def append(self, path: str, data: bytes) -> None:
        """Write data at the end of a file."""
        try:
            await asyncio.to_thread(_append, Path(path), data)
        except OSError as error:
            raise HostError(f"local: {path}: {error.strerror}") from error

    async def get(self, path: str) -> bytes:
        try:
            return await asyncio.to_thread(Path(path).read_bytes)
        except OSError as error:
            raise HostError(f"local: {path}: {error.strerror}") from error

    async def fetch(self, path: str, target: Path) -> None:
        try:
            await asyncio.to_thread(shutil.copyfile, path, target)
        except OSError as error:
            raise HostError(f"local: {path}: {error.strerror}") from error

    async def dial(self, path: str) -> Endpoint:
        return Endpoint(path)

    async def reach(self, path: str) -> None:
        """Do nothing: who is on this machine can reach it."""


class ProcessStream:
    """A subprocess's pipes as a ``ByteStream``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._errors = b""
        self._listening = asyncio.create_task(self._listen())

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace").strip()

    @property
    def link_silent_s(self) -> float:
        """Infinite, since pipes share no connection."""
        return math.inf

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(READ_BYTES)

    async def readline(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def write(self, data: bytes) -> None:
        """Write to standard input.

        Raises:
            HostLost: the process reads no more.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise HostLost(f"local: process {self._process.pid} does not read any more") from error

    async def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def exit_code(self) -> int:
        """Wait for the process, and for the last of its standard error."""
        code = await self._process.wait()
        await self._hear_the_last()
        return code

    async def close(self) -> None:
        """Kill the process and wait for its end."""
        _kill(self._process)
        await self._process.wait()
        await self._hear_the_last()

    async def _hear_the_last(self) -> None:
        """Read the rest of standard error, which something that was started may keep open."""
        await asyncio.wait({self._listening}, timeout=LAST_WORDS_S)
        self._listening.cancel()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(ERRORS_KEPT):
            self._errors = (self._errors + data)[-ERRORS_KEPT:]


async def _spawn(argv: Sequence[str]) -> Process:
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=LINE_LIMIT,
        # A Ctrl-C in the terminal goes to the controller alone: it has processes to stop.
        start_new_session=True,
    )


def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _put_tree(files: Mapping[str, bytes], directory: Path) -> None:
    if directory.exists():
        return
    draft = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}")
    try:
        for name, data in files.items():
            (draft / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (draft / name).write_bytes(data)
        os.rename(draft, directory)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not directory.exists():  # else another process has put the same files there
            raise
