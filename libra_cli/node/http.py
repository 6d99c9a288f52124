"""HTTP for the processes of a run: JSON or bytes out, the run's bearer token on every route."""

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
    """An answer that is not JSON."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Answer: TypeAlias = tuple[HTTPStatus, dict[str, Any]]
Reply: TypeAlias = tuple[HTTPStatus, dict[str, Any] | Blob]


def refusal(status: HTTPStatus, reason: str) -> Answer:
    """``{"error": reason}``."""
    return status, {"error": reason}


def read_token(path: str) -> str:
    """The run's token, from the file that LIBRA_TOKEN_FILE names."""
    return Path(path).read_text(encoding="utf-8").strip()


class BearerHandler(BaseHTTPRequestHandler):
    """Subclasses answer ``get`` and ``post``; whoever has no token hears 401 and nothing else.

    ``TrainerError`` and whatever cannot be read become 400.
    """

    token: str
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = SOCKET_TIMEOUT_S
    # Without it Nagle and delayed acks add 40 ms to every answer.
    disable_nagle_algorithm = True

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        """The answer to a GET."""
        return self.no_route(path)

    def post(self, path: str, body: bytes) -> Reply:
        """The answer to a POST."""
        return self.no_route(path)

    def no_route(self, path: str) -> Answer:
        """404."""
        return refusal(HTTPStatus.NOT_FOUND, f"no route {path}")

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self._answer(lambda: self.get(url.path, dict(parse_qsl(url.query))))

    def do_POST(self) -> None:
        self._answer(lambda: self.post(urlsplit(self.path).path, self._body()))

    def _answer(self, route: Callable[[], Reply]) -> None:
        status: HTTPStatus
        body: dict[str, Any] | Blob
        try:
            status, body = route() if self._trusted() else refusal(HTTPStatus.UNAUTHORIZED, "token")
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

    def _trusted(self) -> bool:
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length", "0"))
        if length > MAX_BODY_BYTES:
            raise ValueError(f"{length} bytes are too many")
        body = self.rfile.read(length)
        if len(body) != length:
            raise ValueError(f"{len(body)} bytes came of {length}")
        return body

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """The journal knows what was asked; a line a poll would bury the log."""


def start(handler: type[BearerHandler], *, bind: str, port: int) -> ThreadingHTTPServer:
    """Answer until ``shutdown()``; returns at once."""
    server = ThreadingHTTPServer((bind, port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
