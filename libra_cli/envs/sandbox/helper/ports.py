"""Listens on a port of a place's loopback for whoever has opened the sandbox."""

from __future__ import annotations

import socket

from libra_cli.envs.sandbox.helper.place import Enclosure

LOOPBACK = "127.0.0.1"
_BACKLOG = 128


def listen(place: Enclosure, channel: socket.socket) -> None:
    """Send a socket that listens in the place over a channel; it stays one of that network.

    Raises:
        OSError: there is no port.
    """
    place.enter()
    with socket.create_server((LOOPBACK, 0), backlog=_BACKLOG) as listener:
        socket.send_fds(channel, [b"+"], [listener.fileno()])
