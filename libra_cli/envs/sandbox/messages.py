"""Messages between a process with sandboxes and its helpers: a JSON object, then raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_SIZES = struct.Struct("!IQ")
LARGEST_HEADER = 1 << 24
"""Bytes of JSON in a message; a command with its variables must fit."""
KILLED = "it is killed as it starts, by a process of the sandbox"
"""Why there is no shell, where nothing else is wrong."""


class ConnectionOver(Exception):
    """The other side has closed the socket."""


def send(channel: socket.socket, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Send one message; blocks until all of it is sent.

    Raises:
        ConnectionOver: the other side has closed the socket.
        ValueError: the header is larger than ``LARGEST_HEADER``.
    """
    told = json.dumps(header).encode()
    if len(told) > LARGEST_HEADER:
        raise ValueError(f"{len(told):,} bytes of a command and its variables are too many")
    try:
        channel.sendall(_SIZES.pack(len(told), len(body)) + told)
        if body:  # who has answered a message without one may have closed the socket by now
            channel.sendall(body)
    except (BrokenPipeError, ConnectionError) as error:
        raise ConnectionOver from error


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive one message; blocks until it is here.

    Raises:
        ConnectionOver: the other side has closed the socket.
    """
    header, body = _SIZES.unpack(_exactly(channel, _SIZES.size))
    return json.loads(_exactly(channel, header)), _exactly(channel, body)


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            received = channel.recv_into(view)
        except ConnectionError as error:
            raise ConnectionOver from error
        if not received:
            raise ConnectionOver
        view = view[received:]
    return bytes(data)
