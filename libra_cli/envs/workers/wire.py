"""What the controller, a fork server and its workers say to one another: frames of msgpack.

A frame is a header (length of the body, episode, kind) and a body. A fork server passes the bodies
of calls and answers on without reading them. Nothing is ever unpickled: a body holds what JSON can,
and besides bytes, integers of any size and tool calls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgpack

from libra_cli.envs.protocol import ToolCall

LARGEST_FRAME = 64 * 1024**2
"""Bytes of a body; a worker that sends more is ended."""
_HEADER = struct.Struct(">IQB")
_TOOL_CALL, _INTEGER = 1, 2


class Kind(IntEnum):
    """The kinds of frames; each number is the last byte of a frame's header."""

    HELLO = 0
    """To a fork server: which environment it serves; from it: whether that could be imported."""
    CALL = 1
    """A call of an episode, or the answer to one; the first call begins the episode."""
    CLOSE = 2
    """To a fork server, which passes it on: the episode is over, so its worker is to end."""
    ENDED = 3
    """An episode's process has ended; the body says how, or is empty if it was closed."""


class TooLarge(ValueError):
    """A frame's body is longer than ``LARGEST_FRAME`` bytes."""


def frame(kind: Kind, episode: int, body: bytes = b"") -> bytes:
    """A whole frame.

    Raises:
        TooLarge: the body is too long.
    """
    if len(body) > LARGEST_FRAME:
        raise TooLarge(f"{len(body):,} bytes are over the limit of {LARGEST_FRAME:,}")
    return _HEADER.pack(len(body), episode, kind) + body


class Frames:
    """Cuts what comes in from one peer into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """Take in some bytes, and yield the frames that are complete.

        Raises:
            ValueError: the peer speaks something else, or sends a frame that is too large.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, episode, kind = _HEADER.unpack_from(self._buffer)
            if length > LARGEST_FRAME:
                raise TooLarge(f"a frame of {length:,} bytes was announced")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Kind(kind), episode, body


def pack(value: Any) -> bytes:
    """A body.

    Raises:
        TypeError: something in it has no form here.
        ValueError: it is nested too deeply.
    """
    body: bytes = msgpack.packb(value, default=_packed, unicode_errors="surrogatepass")
    return body


def unpack(body: bytes) -> Any:
    """What ``pack`` was given, with lists for tuples.

    Raises:
        ValueError: it is no body.
    """
    try:
        return msgpack.unpackb(
            body, ext_hook=_unpacked, unicode_errors="surrogatepass", strict_map_key=False
        )
    except (msgpack.UnpackException, TypeError, RecursionError) as error:
        raise ValueError(f"not a body: {error}") from error


def _packed(value: Any) -> Any:
    if isinstance(value, ToolCall):
        return msgpack.ExtType(_TOOL_CALL, pack([value.name, dict(value.arguments)]))
    if isinstance(value, int):  # of more than 64 bits
        return msgpack.ExtType(_INTEGER, f"{value:x}".encode())
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _unpacked(code: int, body: bytes) -> Any:
    if code == _TOOL_CALL:
        name, arguments = unpack(body)
        return ToolCall(name, arguments)
    if code == _INTEGER:
        return int(body, 16)
    raise ValueError(f"extension {code}")
