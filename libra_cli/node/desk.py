"""Where the trainer takes orders: HTTP on loopback, a bearer token on every route.

    GET  /health            {"state", "world_size", "step", "trainer_epoch", "published", "error"}
    POST /train             a batch (msgpack); 202, also when the step is known already
    GET  /train/<step>      {"state": "running" | "done" | "failed", ...}; ?wait_s= waits for an end
    POST /checkpoint        {"ledger": {...}} -> {"path"}, when it is written
    POST /stop              every rank leaves

Requests may be repeated. The threads of the server only exchange values with the rank's own loop,
under one lock; an order is taken with ``take`` and answered with ``done`` or ``fail``.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgpack

MAX_WAIT_S = 60.0
CHECKPOINT_WAIT_S = 1800.0


class Desk:
    """Orders in, answers out. ``health`` is what GET /health says."""

    def __init__(self, port: int, token: str) -> None:
        self._changed = threading.Condition()
        self._orders: deque[dict[str, Any]] = deque()
        self._answers: dict[str, dict[str, Any]] = {}
        self.health: dict[str, Any] = {"state": "starting", "step": 0, "error": ""}
        handler = type("Handler", (_Handler,), {"desk": self, "expected": f"Bearer {token}"})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def tell(self, **health: Any) -> None:
        """Change what GET /health says."""
        with self._changed:
            self.health = {**self.health, **health}
            self._changed.notify_all()

    # -- the rank's side --------------------------------------------------------------------------

    def take(self, timeout_s: float) -> dict[str, Any] | None:
        """The next order, or None when there is none in that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders, timeout_s)
            return self._orders.popleft() if self._orders else None

    def done(self, key: str, answer: dict[str, Any]) -> None:
        """Answer an order. Only the newest few answers are kept."""
        with self._changed:
            self._answers[key] = {"state": "done", **answer}
            while len(self._answers) > 8:
                del self._answers[next(iter(self._answers))]
            self._changed.notify_all()

    def fail(self, error: str) -> None:
        """Nothing will be answered any more; say why to everybody who asks."""
        self.tell(state="failed", error=error)

    # -- the threads' side ------------------------------------------------------------------------

    def order(self, key: str, order: dict[str, Any]) -> None:
        """Take an order in, once."""
        with self._changed:
            if key not in self._answers:
                self._answers[key] = {"state": "running"}
                self._orders.append({**order, "key": key})
                self._changed.notify_all()

    def ask(self, key: str, wait_s: float) -> dict[str, Any] | None:
        """The state of an order, waiting a while for its end; None if it is not known."""

        def ended() -> bool:
            answer = self._answers.get(key)
            return answer is None or answer["state"] != "running" or bool(self.health["error"])

        with self._changed:
            self._changed.wait_for(ended, wait_s)
            if self.health["error"]:
                return {"state": "failed", "error": self.health["error"]}
            return self._answers.get(key)


class _Handler(BaseHTTPRequestHandler):
    """One request. ``desk`` and ``expected`` are set on a subclass."""

    desk: Desk
    expected: str
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes; without this each answer waits for a delayed ACK (40 ms).
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Health, or the state of a step."""
        url = urlsplit(self.path)
        if not self._allowed():
            return
        if url.path == "/health":
            self._answer(200, self.desk.health)
        elif url.path.startswith("/train/"):
            wait_s = float(parse_qs(url.query).get("wait_s", ["0"])[0])
            answer = self.desk.ask(url.path, min(wait_s, MAX_WAIT_S))
            self._answer(404 if answer is None else 200, answer or {"error": "no such step"})
        else:
            self._answer(404, {"error": f"no route {url.path}"})

    def do_POST(self) -> None:
        """A step, a checkpoint, or the end."""
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self._allowed():
            return
        if self.path == "/train":
            self._train(msgpack.unpackb(body))
        elif self.path == "/checkpoint":
            self._checkpoint(json.loads(body))
        elif self.path == "/stop":
            self.desk.order("/stop", {"do": "stop"})
            self._answer(202, {})
        else:
            self._answer(404, {"error": f"no route {self.path}"})

    def _train(self, order: dict[str, Any]) -> None:
        step, at = int(order["step"]), int(self.desk.health["step"])
        if step not in (at, at + 1):
            self._answer(409, {"error": f"step {step} cannot follow step {at}"})
            return
        self.desk.order(f"/train/{step}", {"do": "train", **order})
        self._answer(202, {})

    def _checkpoint(self, order: dict[str, Any]) -> None:
        key = f"/checkpoint/{self.desk.health['step']}/{time.monotonic_ns()}"
        self.desk.order(key, {"do": "checkpoint", **order})
        answer = self.desk.ask(key, CHECKPOINT_WAIT_S)
        if answer is None or answer["state"] != "done":
            self._answer(500, answer or {"error": "the checkpoint was forgotten"})
        else:
            self._answer(200, answer)

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), self.expected.encode()):
            return True
        self._answer(401, {"error": "a bearer token is needed"})
        return False

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  http.server's name
        """Requests are not worth a line each."""
