"""What rank 0 answers to, and the desk where HTTP threads leave work for the training loop.

    GET  /health                    state, world, step, published, checkpoint; always at once
    POST /train                     msgpack; 202 taken (again: 202, nothing happens), 409 wrong step
    GET  /train/<step>?wait_s=20    running | done | failed; waits at most wait_s for the end
    POST /checkpoint                {"ledger": {}} -> {"path"}
    POST /stop                      all ranks leave after what they are doing

Every route demands the run's bearer token. A step is ``done`` as soon as its version is published;
a checkpoint asked for with it is written after that, and then named in the same answer (asked for
again) and in ``/health``. Torch releases the interpreter in its kernels, so these threads answer
during a step. ``Desk`` is the only thing that threads share.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from urllib.parse import parse_qs, urlsplit

import msgpack

from libra_cli.errors import TrainerError
from libra_cli.node.samples import Sample, read_sample

if TYPE_CHECKING:
    from libra_cli.node.weights import Published

MAX_WAIT_S = 60.0
MAX_BODY_BYTES = 4 * 1024**3
SOCKET_TIMEOUT_S = 120.0
KEPT_RESULTS = 8
Answer: TypeAlias = tuple[HTTPStatus, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Train:
    """Take optimizer step ``step``; with a ledger, write a checkpoint after it."""

    step: int
    samples: tuple[Sample, ...]
    ledger: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write one now."""

    ledger: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing came; sent so that no rank waits long without hearing from rank 0."""


Command: TypeAlias = Train | Checkpoint | Stop | Idle


@dataclass(slots=True)
class Desk:
    """Commands in, results out, under one condition. Steps are taken in order, each once."""

    world_size: int
    trainer_epoch: int
    max_len: int
    checkpoint_timeout_s: float = 1800.0
    state: str = "starting"
    """``starting | ready | failed``"""
    error: str = ""
    step: int = 0
    """The last step that is done; the version that is published."""
    accepted: int = 0
    """The last step that was taken; step or step + 1."""
    checkpoint: str = ""
    """The last checkpoint that is complete."""
    published: dict[str, Any] | None = None
    """The newest version: name, version, bytes, published_at."""
    stopping: bool = False
    _checkpoints: int = 0
    _commands: deque[Command] = field(default_factory=deque)
    _results: dict[int, dict[str, Any]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The training loop's side.

    def next(self, timeout_s: float) -> Command:
        """The oldest command, or ``Idle`` after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)
            return self._commands.popleft() if self._commands else Idle()

    def ready(self, version: Published, checkpoint: str) -> None:
        """The version to start from is published."""
        step = version.version
        with self._changed:
            self.state, self.step, self.accepted, self.checkpoint = "ready", step, step, checkpoint
            self.published = asdict(version)
            self._changed.notify_all()

    def done(self, step: int, metrics: Mapping[str, Any], version: Published) -> None:
        """Step ``step`` is taken and its version published."""
        with self._changed:
            self.step, self.published = step, asdict(version)
            self._results[step] = {
                "state": "done",
                "metrics": dict(metrics),
                "version": self.published,
                "checkpoint": "",
            }
            self._results.pop(step - KEPT_RESULTS, None)
            self._changed.notify_all()

    def saved(self, step: int, path: str) -> None:
        """A checkpoint is complete."""
        with self._changed:
            self.checkpoint = path
            self._checkpoints += 1
            if step in self._results:
                self._results[step]["checkpoint"] = path
            self._changed.notify_all()

    def fail(self, error: str) -> None:
        """The trainer can do no more; everybody who waits is told."""
        with self._changed:
            self.state, self.error = "failed", error
            self._changed.notify_all()

    def wait_for_stop(self, timeout_s: float) -> bool:
        """After a failure: until someone has read it and says stop."""
        with self._changed:
            return self._changed.wait_for(lambda: self.stopping, timeout_s)

    # The HTTP threads' side.

    def health(self) -> Answer:
        """How it stands."""
        with self._changed:
            return HTTPStatus.OK, {
                "state": self.state,
                "world_size": self.world_size,
                "step": self.step,
                "published": self.published,
                "trainer_epoch": self.trainer_epoch,
                "checkpoint": self.checkpoint,
                "error": self.error,
            }

    def train(self, message: Mapping[str, Any]) -> Answer:
        """Take a step, unless it is not the next one."""
        step = int(message["step"])
        with self._changed:
            refused = self._refusal(step)
        if refused:
            return refused
        samples = tuple(read_sample(raw, max_len=self.max_len) for raw in message["trajectories"])
        checkpoint = message.get("checkpoint")
        command = Train(step, samples, checkpoint["ledger"] if checkpoint else None)
        with self._changed:
            # Reading took time, and the same step may have come twice.
            refused = self._refusal(step)
            if refused:
                return refused
            self.accepted = step
            self._commands.append(command)
            self._changed.notify_all()
        return HTTPStatus.ACCEPTED, {"state": "running"}

    def _refusal(self, step: int) -> Answer | None:
        if self.state != "ready" or self.stopping:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, self.error or f"trainer is {self.state}")
        if step == self.accepted and step > 0:
            return HTTPStatus.ACCEPTED, {"state": "running"}
        if step != self.accepted + 1:
            return _error(
                HTTPStatus.CONFLICT, f"step {step} was sent, the next one is {self.accepted + 1}"
            )
        return None

    def result(self, step: int, wait_s: float) -> Answer:
        """How a step ended, waiting a while for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: step in self._results or self.state == "failed", min(wait_s, MAX_WAIT_S)
            )
            if step in self._results:
                return HTTPStatus.OK, dict(self._results[step])
            if self.state == "failed":
                return HTTPStatus.OK, {"state": "failed", "error": self.error}
            if step == self.accepted:
                return HTTPStatus.OK, {"state": "running"}
            return _error(HTTPStatus.NOT_FOUND, f"step {step} was never sent")

    def save(self, ledger: Mapping[str, Any]) -> Answer:
        """A checkpoint of now; answers when it is complete."""
        with self._changed:
            if self.state != "ready":
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, f"trainer is {self.state}")
            # Those already asked for come first.
            queued = sum(
                isinstance(command, Checkpoint)
                or (isinstance(command, Train) and command.ledger is not None)
                for command in self._commands
            )
            wanted = self._checkpoints + queued + 1
            self._commands.append(Checkpoint(ledger))
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._checkpoints >= wanted or self.state == "failed",
                self.checkpoint_timeout_s,
            )
            if self.state == "failed":
                return _error(HTTPStatus.INTERNAL_SERVER_ERROR, self.error)
            if self._checkpoints < wanted:
                return _error(
                    HTTPStatus.GATEWAY_TIMEOUT,
                    f"no checkpoint within {self.checkpoint_timeout_s:.0f} s",
                )
            return HTTPStatus.OK, {"path": self.checkpoint}

    def stop(self) -> Answer:
        """Leave after what is being done."""
        with self._changed:
            self.stopping = True
            self._commands.append(Stop())
            self._changed.notify_all()
        return HTTPStatus.ACCEPTED, {"state": "stopping"}


def serve(desk: Desk, *, port: int, token: str) -> ThreadingHTTPServer:
    """Answer on the loopback until ``shutdown()``; returns at once."""

    class Handler(_Handler):
        pass

    Handler.desk, Handler.token = desk, token
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    desk: Desk
    token: str
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = SOCKET_TIMEOUT_S
    # Without it Nagle and delayed acks add 40 ms to every answer.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, route: Any) -> None:
        try:
            status, body = route() if self._trusted() else _error(HTTPStatus.UNAUTHORIZED, "token")
        except TrainerError as error:
            status, body = _error(HTTPStatus.BAD_REQUEST, str(error))
        except (KeyError, TypeError, ValueError) as error:
            status, body = _error(HTTPStatus.BAD_REQUEST, f"cannot be read: {error!r}")
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= HTTPStatus.BAD_REQUEST:
            # An unread body would be taken for the next request.
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _trusted(self) -> bool:
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    def _get(self) -> Answer:
        url = urlsplit(self.path)
        if url.path == "/health":
            return self.desk.health()
        head, _, step = url.path.rpartition("/")
        if head == "/train":
            wait_s = float(parse_qs(url.query).get("wait_s", ["0"])[0])
            return self.desk.result(int(step), wait_s)
        return _error(HTTPStatus.NOT_FOUND, f"no route {url.path}")

    def _post(self) -> Answer:
        body = self._body()
        match urlsplit(self.path).path:
            case "/train":
                return self.desk.train(msgpack.unpackb(body))
            case "/checkpoint":
                return self.desk.save(json.loads(body)["ledger"])
            case "/stop":
                return self.desk.stop()
            case path:
                return _error(HTTPStatus.NOT_FOUND, f"no route {path}")

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


def _error(status: HTTPStatus, reason: str) -> Answer:
    return status, {"error": reason}
