"""Copies large files to a host with no Python of ours there; what was copied before is kept.

A file grows as ``NAME.part`` and gets its name once its SHA-256 is right, so a copy that broke off
goes on where it stopped. Needs ``head``, ``tail``, ``find`` and ``sha256sum`` on the host.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libra_cli.config.errors import HostError, InputError
from libra_cli.runtime.hosts.transport import CommandResult, Transport

CHUNK = 16 * 1024**2
CHUNK_S = 120.0
HASH_S = 3600.0
"""Seconds for reading a whole model from a slow disk."""
SHELL_S = 60.0


class FileSource(Protocol):
    """A directory that files are copied from, each by its name."""

    async def hashes(self) -> Mapping[str, str]:
        """Return the SHA-256 of every file, by name."""

    async def read(self, name: str, offset: int, size: int) -> bytes:
        """Return at most ``size`` bytes from ``offset`` on; empty at the end."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """A directory of the controller, as a source of files.

    InputError, with a hint, if a file cannot be read.
    """

    directory: Path

    async def hashes(self) -> Mapping[str, str]:
        with self._refusals_told():
            return await asyncio.to_thread(_hashes, self.directory)

    async def read(self, name: str, offset: int, size: int) -> bytes:
        """Read at most ``size`` bytes from ``offset`` on."""
        with self._refusals_told():
            return await asyncio.to_thread(_read, self.directory / name, offset, size)

    @contextmanager
    def _refusals_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            told = f"{self.directory} cannot be read here: {error}"
            raise InputError(told, hint=f"ls -l {self.directory}") from error


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Files of a directory of a host, which come through the controller."""

    transport: Transport
    directory: str

    async def hashes(self) -> Mapping[str, str]:
        """The SHA-256 of every file; none if there is no such directory.

        In a Hugging Face cache all files are links, which ``find -L`` follows.
        """
        script = (
            'cd "$1" 2>/dev/null || exit 0; find -L . -maxdepth 1 -type f ! -name ".*" '
            '! -name "*.part" -print0 | xargs -0 -r -P 4 -n 1 sha256sum --'
        )
        done = await shell(self.transport, script, self.directory, timeout_s=HASH_S)
        lines = (line.split("  ./", 1) for line in done.stdout.decode().splitlines())
        return {name: digest for digest, name in lines}

    async def read(self, name: str, offset: int, size: int) -> bytes:
        """Read at most ``size`` bytes from ``offset`` on."""
        script = 'tail -c "+$2" -- "$1" | head -c "$3"'
        path = f"{self.directory}/{name}"
        words = path, str(offset + 1), str(size)
        return (await shell(self.transport, script, *words, timeout_s=CHUNK_S)).stdout


def _hashes(directory: Path) -> dict[str, str]:
    files = (one for one in directory.iterdir() if one.is_file())
    kept = [one for one in files if not one.name.startswith(".") and one.suffix != ".part"]
    return {path.name: file_digest(path) for path in kept}


def file_digest(path: Path) -> str:
    """The SHA-256 of a file of the controller."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def expanded(transport: Transport, path: str) -> str:
    """Return a path as an absolute one on a host that is connected."""
    return f"{transport.home}{path[1:]}" if path.partition("/")[0] == "~" else path


async def shell(
    transport: Transport, script: str, *words: str, stdin: bytes = b"", timeout_s: float = SHELL_S
) -> CommandResult:
    """Run a script, with words as ``$1`` and so on. Raises HostError if it fails."""
    argv = ["sh", "-c", script, "sh", *words]
    done = await transport.run(argv, stdin=stdin, timeout_s=timeout_s)
    if done.exit_code:
        raise HostError(f"{transport.target}: {done.last_words}")
    return done


async def copy_file(
    source: FileSource,
    name: str,
    digest: str,
    transport: Transport,
    directory: str,
    *,
    on_bytes: Callable[[int], None],
) -> None:
    """Copy one file into a directory of a host; ``on_bytes`` is told of every chunk.

    Raises:
        HostError: it cannot be written there, or arrives damaged twice.
    """
    path = f"{directory}/{name}"
    for _ in range(2):  # what a copy that broke off has left may be of another file
        script = 'mkdir -p "$(dirname "$1")" && touch "$1" && wc -c < "$1"'
        offset = int((await shell(transport, script, f"{path}.part")).stdout)
        on_bytes(offset)
        while data := await source.read(name, offset, CHUNK):
            await transport.append(f"{path}.part", data)
            offset += len(data)
            on_bytes(len(data))
        script = 'sha256sum -- "$1"'
        found = await shell(transport, script, f"{path}.part", timeout_s=HASH_S)
        if found.stdout.split()[0].decode() == digest:
            await shell(transport, 'mv -- "$1.part" "$1"', path)
            return
        await shell(transport, 'rm -- "$1.part"', path)
        on_bytes(-offset)
    raise HostError(f"{transport.target}: {path}: it arrives damaged")


async def copy_missing(
    source: FileSource,
    wanted: Mapping[str, str],
    transport: Transport,
    directory: str,
    *,
    on_bytes: Callable[[int], None],
) -> list[str]:
    """Copy every file that a directory of a host lacks or has with other content; their names."""
    there = await HostFiles(transport, directory).hashes()
    missing = [name for name, digest in wanted.items() if there.get(name) != digest]
    for name in missing:
        await copy_file(source, name, wanted[name], transport, directory, on_bytes=on_bytes)
    return missing
