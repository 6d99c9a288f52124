"""Measures how fast one host's data reaches another, encrypted as weights and gradients are.

The host that sends listens on a port of its range for one measurement, and sends to hosts of the
run alone. Nothing else can be asked there. Blocks; standard library only.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.credentials import Credentials
from libra_cli.node.http import bind_port, own_address

STREAMS = 4
"""Connections at a time: one does not fill a fast network."""
CONNECT_S = 5.0
WAIT_S = 30.0
"""Seconds that the sender waits for all connections to be made."""
CHUNK = 1024**2


def serve(bind: str, port: int, credentials: Credentials, seconds: float) -> None:
    """Listen at ``bind`` and send data to hosts of the run, ``seconds`` to each; returns at once.

    Raises:
        AgentRefused: the port is taken, or the address is none of this host.
    """
    try:
        listener = bind_port((own_address(bind), port), is_reserved=True)
    except OSError as error:
        raise AgentRefused("ports", f"{bind} port {port}: {error}") from error
    listener.listen(2 * STREAMS)
    arguments = listener, credentials.server(), seconds
    threading.Thread(target=_accept, args=arguments, daemon=True).start()


def _accept(listener: socket.socket, tls: ssl.SSLContext, seconds: float) -> None:
    give_up = time.monotonic() + WAIT_S
    served = 0
    with listener:
        while served < STREAMS and (left := give_up - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError):
                connection, _ = listener.accept()
                served += 1
                arguments = connection, tls, seconds
                threading.Thread(target=_send, args=arguments, daemon=True).start()


def _send(connection: socket.socket, tls: ssl.SSLContext, seconds: float) -> None:
    with connection, suppress(OSError):
        connection.settimeout(CONNECT_S)
        with tls.wrap_socket(connection, server_side=True) as verified:
            data = os.urandom(CHUNK)  # not zeros, which a tunnel may compress
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                verified.sendall(data)


def receive(source: str, credentials: Credentials) -> dict[str, float]:
    """Receive from a sender until it ends: bytes of all connections, and seconds.

    ``source`` is ``https://address:port#name``, with the name in the sender's certificate.

    Raises:
        AgentRefused: it cannot be reached, or sends nothing.
    """
    try:
        with ThreadPoolExecutor(STREAMS) as threads:
            started = time.monotonic()
            tls = credentials.client()
            waiting = [threads.submit(_receive, source, tls) for _ in range(STREAMS)]
            received = sum(one.result() for one in waiting)
            seconds = time.monotonic() - started
    except OSError as error:
        raise AgentRefused("request", f"{source.partition('#')[0]}: {error}") from error
    if not received:
        raise AgentRefused("request", f"{source.partition('#')[0]}: it sent nothing")
    return {"bytes": received, "seconds": seconds}


def _receive(source: str, tls: ssl.SSLContext) -> int:
    buffer, received, place = bytearray(CHUNK), 0, urlsplit(source)
    with (
        socket.create_connection((place.hostname, place.port), timeout=CONNECT_S) as connection,
        tls.wrap_socket(connection, server_hostname=place.fragment) as verified,
    ):
        while count := verified.recv_into(buffer):
            received += count
    return received
