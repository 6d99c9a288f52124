"""What the controller and a host say to one another about the agents there, as msgpack.

    to the host     hello    where files of ``directory`` go, the command, its variables
                    start    a job by number: id, task, key, model
                    kill     a job by number
    from the host   ready    empty, or why no command can be started
                    ended    a job by number: status, last words, whether it flooded; or a reason
    both ways       data     bytes of an HTTP connection by number; the first opens it
                    close    it is over

Connections are numbered in the order of their first bytes.

A connection to the port that the host listens on for its agents is carried over the same stream to
the controller's endpoint: nothing else has to be open between the two, and all of it ends with the
stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgpack

Say: TypeAlias = Literal["hello", "start", "kill", "ready", "ended", "data", "close"]
LARGEST = 256 * 1024**2
"""Bytes of one message: all files of ``agent.directory`` are one."""


def message(say: Say, number: int, body: Any = None) -> bytes:
    """One message, of a job or a connection of this number."""
    packed: bytes = msgpack.packb((say, number, body))
    return packed


class MessageReader:
    """Cuts a stream of bytes into messages of kind, number (of a job or a connection) and body."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=LARGEST, strict_map_key=False)

    def feed(self, data: bytes) -> Iterator[tuple[Say, int, Any]]:
        """Take in bytes and yield the messages that are complete.

        Raises:
            ValueError: the bytes are not msgpack, or a message is longer than ``LARGEST``.
        """
        try:
            self._unpacker.feed(data)
            yield from self._unpacker
        except (msgpack.UnpackException, TypeError) as error:
            raise ValueError(f"not a message: {error}") from error


def packed_files(directory: Path) -> list[tuple[str, int, bytes]]:
    """The files below a directory: path, mode and content.

    Raises:
        OSError: one cannot be read.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [
        (path.relative_to(directory).as_posix(), path.stat().st_mode & 0o777, path.read_bytes())
        for path in files
    ]


def unpacked_files(files: list[tuple[str, int, bytes]], directory: Path) -> None:
    """Write them below another directory.

    Raises:
        OSError: one cannot be written.
    """
    for name, mode, data in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)
