"""HTTP servers that processes of a run are for other hosts, with the run's bearer token demanded.

``BearerHandler`` checks the token; ``JsonHandler`` adds routes that answer with JSON or bytes. They
speak TLS with hosts of the run alone (``node.credentials``), and listen at the address that the
recipe names. What the controller orders comes over ``node.control``. Standard library only.
"""

from __future__ import annotations

import errno
import hmac
import json
import socket
import ssl
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from libra_cli.config.errors import NONSENSE, TrainerError
from libra_cli.node.credentials import Credentials

SOCKET_TIMEOUT_S = 120.0
HANDSHAKE_S = 10.0
"""How long whoever connects may take to show a certificate."""
FILE_BLOCK = 1024**2
"""Bytes of a file that are encrypted at a time."""


@dataclass(frozen=True, slots=True)
class Blob:
    """An answer of raw bytes, with headers of its own."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Answer: TypeAlias = tuple[HTTPStatus, dict[str, Any]]
"""The status and the JSON object of an answer."""
Reply: TypeAlias = tuple[HTTPStatus, dict[str, Any] | Blob]
"""The status and the body of an answer, JSON or bytes."""


def refusal(status: HTTPStatus, reason: str) -> Answer:
    """Return an answer whose body is ``{"error": reason}``."""
    return status, {"error": reason}


def read_token(path: str) -> str:
    """Read the run's token from the file that ``LIBRA_TOKEN_FILE`` names.

    Raises:
        TrainerError: the file is empty, and whoever sends no token would be let in.
    """
    if token := Path(path).read_text(encoding="utf-8").strip():
        return token
    raise TrainerError(f"{path} is empty: a process of a run needs the run's token")


def carries_token(authorization: bytes, token: str) -> bool:
    """Tell in constant time whether an ``Authorization`` header holds the run's token."""
    return bool(token) and hmac.compare_digest(authorization, f"Bearer {token}".encode())


class BearerHandler(BaseHTTPRequestHandler):
    """An HTTP/1.1 handler that knows who carries the token and logs no requests."""

    token: str
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = SOCKET_TIMEOUT_S

    def is_trusted(self) -> bool:
        """Tell whether the request carries the run's token."""
        return carries_token(self.headers.get("Authorization", "").encode(), self.token)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: a line for every poll would bury the log."""


class JsonHandler(BearerHandler):
    """A handler whose subclasses implement the routes of ``get``.

    A request without the token is answered with 401 before any route sees it. ``TrainerError``, and
    a query that cannot be read, become 400.
    """

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        """Answer a GET request; this one, for servers without routes, says that there is none."""
        return self.no_route(path)

    def no_route(self, path: str) -> Answer:
        return refusal(HTTPStatus.NOT_FOUND, f"no route {path}")

    def do_GET(self) -> None:
        """Answer a GET request by ``get``; ``http.server`` calls this by its name."""
        status: HTTPStatus
        body: dict[str, Any] | Blob
        try:
            status, body = self._route()
        except TrainerError as error:
            status, body = refusal(HTTPStatus.BAD_REQUEST, str(error))
        except NONSENSE as error:
            status, body = refusal(HTTPStatus.BAD_REQUEST, f"cannot be read: {error!r}")
        if isinstance(body, Blob):
            self._send(status, "application/octet-stream", body)
        else:
            self._send(status, "application/json", Blob(json.dumps(body).encode()))

    def _route(self) -> Reply:
        if not self.is_trusted():
            return refusal(HTTPStatus.UNAUTHORIZED, "token")
        url = urlsplit(self.path)
        return self.get(url.path, dict(parse_qsl(url.query)))

    def _send(self, status: HTTPStatus, kind: str, blob: Blob) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(blob.data)))
        for name, value in blob.headers.items():
            self.send_header(name, value)
        if status >= HTTPStatus.BAD_REQUEST:
            # An unread body would be taken for the next request.
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(blob.data)


class HostServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, after both have verified the other."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, bound: socket.socket, handler: type[BearerHandler], tls: ssl.SSLContext
    ) -> None:
        """Listen on a socket that is bound, and answer until ``shutdown()``.

        Returns at once: the threads are daemon threads.
        """
        super().__init__(bound.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.tls = bound, tls
        self.server_activate()
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Talk; ``socketserver`` calls this in the connection's thread."""
        request.settimeout(HANDSHAKE_S)
        # With Nagle's algorithm delayed acks add 40 ms to every answer.
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.tls.wrap_socket(request, server_side=True) as verified:
            super().finish_request(verified, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke, or a stranger, is no error of ours; anything else is logged."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve_hosts(
    handler: type[BearerHandler],
    *,
    bind: str,
    port: int,
    credentials: Credentials,
    is_reserved: bool = False,
    **attributes: object,
) -> HostServer:
    """Answer other hosts of the run with a handler that has these class attributes.

    ``bind`` is the address or name of this host that the others know. Port 0 picks a free one, one
    that ``is_reserved`` is held by this host's agent (``node.processes.ports``).

    Raises:
        OSError: somebody else listens there, or ``bind`` is no address of this host.
    """
    sock = bind_port((own_address(bind), port), is_reserved=is_reserved)
    own = type(handler.__name__, (handler,), {"token": credentials.token, **attributes})
    return HostServer(sock, own, credentials.server())


def bind_port(place: tuple[str, int], *, is_reserved: bool) -> socket.socket:
    """A socket that is bound to an address and a port of this host; see ``serve_hosts``.

    Raises:
        OSError: somebody listens there, or holds it.
    """
    if is_reserved:
        with socket.socket() as probe:  # two of this user could both listen
            probe.settimeout(HANDSHAKE_S)
            if not probe.connect_ex(place):
                raise OSError(errno.EADDRINUSE, "a process of this user listens there already")
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_reserved))
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock


def own_address(name: str) -> str:
    """The address of this host that the others know by this name.

    Not a loopback's, which many hosts give to their own name.

    Raises:
        OSError: it has none.
    """
    found = [str(one[4][0]) for one in socket.getaddrinfo(name, None, socket.AF_INET)]
    outside = [one for one in found if not one.startswith("127.") or one == name]
    if not outside:
        raise OSError(f"{name} is {found[0]} here, where no other host can come")
    return outside[0]


def send_file(connection: socket.socket, file: BinaryIO, first: int, count: int) -> None:
    """Send ``count`` bytes of a file from ``first`` on.

    ``SSLSocket.sendfile`` would take 8 KiB at a time.

    Raises:
        OSError: whoever asked has hung up.
    """
    if not isinstance(connection, ssl.SSLSocket):
        connection.sendfile(file, first, count)
        return
    block = memoryview(bytearray(min(count, FILE_BLOCK)))
    file.seek(first)
    while count > 0:
        size = file.readinto(block[: min(count, FILE_BLOCK)])  # type: ignore[attr-defined]
        if not size:
            raise ConnectionError("the file ended")
        connection.sendall(block[:size])
        count -= size
