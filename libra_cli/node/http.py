"""HTTP servers for the processes of a run, with the run's bearer token on every route.

``BearerHandler`` checks the token; ``JsonHandler`` adds routes that answer with JSON or bytes.
Standard library only.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from libra_cli.config.errors import TrainerError

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 4 * 1024**3
SOCKET_TIMEOUT_S = 120.0


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
    """Read the run's token from the file that ``LIBRA_TOKEN_FILE`` names."""
    return Path(path).read_text(encoding="utf-8").strip()


def carries_token(authorization: bytes, token: str) -> bool:
    """Tell in constant time whether an ``Authorization`` header holds the run's token."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())


class BearerHandler(BaseHTTPRequestHandler):
    """An HTTP/1.1 handler that knows who carries the token and logs no requests."""

    token: str
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = SOCKET_TIMEOUT_S
    # Without it Nagle and delayed acks add 40 ms to every answer.
    disable_nagle_algorithm = True

    def is_trusted(self) -> bool:
        """Tell whether the request carries the run's token."""
        return carries_token(self.headers.get("Authorization", "").encode(), self.token)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: a line for every poll would bury the log."""


class JsonHandler(BearerHandler):
    """A handler whose subclasses implement the routes ``get`` and ``post``.

    A request without the token is answered with 401 before any route sees it. ``TrainerError``, and
    a body or a query that cannot be read, become 400.
    """

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        """Answer a GET request."""
        return self.no_route(path)

    def post(self, path: str, body: bytes) -> Reply:
        """Answer a POST request."""
        return self.no_route(path)

    def no_route(self, path: str) -> Answer:
        """Answer 404."""
        return refusal(HTTPStatus.NOT_FOUND, f"no route {path}")

    def do_GET(self) -> None:
        """Route a GET request; ``http.server`` calls this."""
        url = urlsplit(self.path)
        self._answer(lambda: self.get(url.path, dict(parse_qsl(url.query))))

    def do_POST(self) -> None:
        """Route a POST request; ``http.server`` calls this."""
        self._answer(lambda: self.post(urlsplit(self.path).path, self._body()))

    def _answer(self, route: Callable[[], Reply]) -> None:
        status: HTTPStatus
        body: dict[str, Any] | Blob
        try:
            status, body = (
                route() if self.is_trusted() else refusal(HTTPStatus.UNAUTHORIZED, "token")
            )
        except TrainerError as error:
            status, body = refusal(HTTPStatus.BAD_REQUEST, str(error))
        except (KeyError, TypeError, ValueError) as error:
            status, body = refusal(HTTPStatus.BAD_REQUEST, f"cannot be read: {error!r}")
        if isinstance(body, Blob):
            self._send(status, "application/octet-stream", body)
        else:
            self._send(status, "application/json", Blob(json.dumps(body).encode()))

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

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length", "0"))
        if length > MAX_BODY_BYTES:
            raise ValueError(f"{length} bytes are too many")
        body = self.rfile.read(length)
        if len(body) != length:
            raise ValueError(f"{len(body)} bytes came of {length}")
        return body


def start(
    handler: type[BearerHandler], *, bind: str, port: int, token: str, **attributes: object
) -> ThreadingHTTPServer:
    """Answer with a handler that has these class attributes, until ``shutdown()``.

    Returns at once; the server and the threads of its requests are daemon threads. Port 0 picks a
    free one.
    """
    bound = type(handler.__name__, (handler,), {"token": token, **attributes})
    server = ThreadingHTTPServer((bind, port), bound)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
