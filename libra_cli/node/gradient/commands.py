"""What rank 0 of a gradient worker answers to the controller, on its host's loopback.

    GET  /health    state, version, incarnation, step (of the last share taken), world; always at
    once
    POST /load      {"directory", "name", "version", "trainer_incarnation"}; answers when it is
    loaded
    POST /share     msgpack; 202 taken (again: 202), 409 if something else is loaded or being done
    POST /drop      {"step"}: its share is not wanted any more
    POST /stop      all ranks leave, dropping what is under way

Every route demands the run's bearer token. The core reads results from the side channel.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any, TypeAlias

import msgpack

from libra_cli.node.gradient.server import GradientStore
from libra_cli.node.http import LOOPBACK, Answer, BearerHandler, Reply, refusal, start
from libra_cli.node.trainer.commands import IdleCommand, StopCommand
from libra_cli.node.trainer.samples import TokenSample, read_samples

LOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Compute with this weight version from now on."""

    directory: str
    name: str
    trainer_incarnation: int


@dataclass(frozen=True, slots=True)
class ComputeCommand:
    """Gradients of a share of step ``step``."""

    step: int
    samples: tuple[TokenSample, ...]


Command: TypeAlias = LoadCommand | ComputeCommand | StopCommand | IdleCommand


@dataclass(slots=True)
class WorkerCommandQueue:
    """Commands in, results out, under one condition. One thing at a time."""

    world_size: int
    max_len: int
    board: GradientStore
    state: str = "starting"
    """``starting | ready | failed``"""
    error: str = ""
    version: str = ""
    """Name of the version that is loaded; empty: none is, or not wholly."""
    trainer_incarnation: int = -1
    """That published it."""
    stopping: bool = False
    busy: str = ""
    """What is being done, for whoever asks for something else."""
    load_timeout_s: float = LOAD_TIMEOUT_S
    _commands: deque[Command] = field(default_factory=deque)
    _loaded: Answer | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The computing side.

    def next(self, timeout_s: float) -> Command:
        """The oldest command, or ``IdleCommand`` after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)
            return self._commands.popleft() if self._commands else IdleCommand()

    def ready(self) -> None:
        """The model is there."""
        with self._changed:
            self.state = "ready"
            self._changed.notify_all()

    def fail(self, error: str) -> None:
        """The worker can do no more; everybody who waits is told."""
        self.board.drop(self.board.step, error)
        with self._changed:
            self.state, self.error = "failed", error
            self._changed.notify_all()

    def wait_for_stop(self, timeout_s: float) -> bool:
        """After a failure: until someone has read it and says stop."""
        with self._changed:
            return self._changed.wait_for(lambda: self.stopping, timeout_s)

    def loaded(self, load: LoadCommand, gap: float, load_s: float) -> None:
        """The version is in place."""
        with self._changed:
            self.version, self.trainer_incarnation = load.name, load.trainer_incarnation
            self._loaded = HTTPStatus.OK, {"gap": gap, "load_s": load_s}
            self._rest()

    def not_loaded(self, problem: str) -> None:
        """The version does not fit; ``version`` was forgotten when loading began."""
        with self._changed:
            self._loaded = refusal(HTTPStatus.BAD_REQUEST, problem)
            self._rest()

    def computed(self) -> None:
        """The share is done with, well or not."""
        with self._changed:
            self._rest()

    def _rest(self) -> None:
        self.busy = ""
        self._changed.notify_all()

    # The HTTP threads' side.

    def health(self) -> Answer:
        """How it stands."""
        with self._changed:
            return HTTPStatus.OK, {
                "state": self.state,
                "error": self.error,
                "version": self.version,
                "incarnation": self.board.incarnation,
                "step": self.board.step,
                "world_size": self.world_size,
            }

    def load(self, message: Mapping[str, Any]) -> Answer:
        """Load a version; answers when that is done."""
        name, trainer_incarnation = str(message["name"]), int(message["trainer_incarnation"])
        command = LoadCommand(str(message["directory"]), name, trainer_incarnation)
        with self._changed:
            if refused := self._refusal():
                return refused
            self.version, self._loaded = "", None
            self._take(command, f"loading {name}")
            self._changed.wait_for(
                lambda: self._loaded is not None or self.state == "failed", self.load_timeout_s
            )
            if self._loaded is not None:
                return self._loaded
            return refusal(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                self.error or f"{name} was not loaded within {self.load_timeout_s:.0f} s",
            )

    def share(self, message: Mapping[str, Any]) -> Answer:
        """Take a share, if the version it is for is loaded and nothing else is being done."""
        step, version = int(message["step"]), str(message["version"])
        wanted = int(message["incarnation"]), int(message["trainer_incarnation"]), version
        with self._changed:
            refused = self._share_refusal(step, wanted)
        if refused:
            return refused
        command = ComputeCommand(step, read_samples(message["trajectories"], self.max_len))
        with self._changed:
            # Reading took time, and the same share may have come twice.
            refused = self._share_refusal(step, wanted)
            if refused:
                return refused
            # Before anybody hears that it is taken, so that the core's question finds it here.
            self.board.begin(step, version)
            self._take(command, f"computing a share of step {step}")
        return HTTPStatus.ACCEPTED, {"state": "running"}

    def _share_refusal(self, step: int, wanted: tuple[int, int, str]) -> Answer | None:
        here = self.board.incarnation, self.trainer_incarnation, self.version
        if wanted != here:
            return refusal(
                HTTPStatus.CONFLICT,
                "wanted is incarnation {}, trainer incarnation {}, version {}; ".format(*wanted)
                + "here is incarnation {}, trainer incarnation {}, version {!r}".format(*here),
            )
        if self.board.has(step, self.version):
            return HTTPStatus.ACCEPTED, {"state": "running"}
        return self._refusal()

    def _refusal(self) -> Answer | None:
        if self.state != "ready" or self.stopping:
            reason = self.error or f"worker is {'stopping' if self.stopping else self.state}"
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        if self.busy:
            return refusal(HTTPStatus.CONFLICT, f"busy {self.busy}")
        return None

    def _take(self, command: Command, busy: str) -> None:
        self.busy = busy
        self._commands.append(command)
        self._changed.notify_all()

    def drop(self, step: int) -> Answer:
        """Forget the share of a step; its computation ends with its micro-batch."""
        self.board.drop(step, f"the share of step {step} was dropped")
        return HTTPStatus.ACCEPTED, {"state": "dropped"}

    def stop(self) -> Answer:
        """Leave, dropping what is being done."""
        self.board.drop(self.board.step, "the worker was stopped")
        with self._changed:
            self.stopping = True
            self._commands.append(StopCommand())
            self._changed.notify_all()
        return HTTPStatus.ACCEPTED, {"state": "stopping"}


def serve(desk: WorkerCommandQueue, *, port: int, token: str) -> ThreadingHTTPServer:
    """Answer on the loopback until ``shutdown()``; returns at once."""
    handler = type("Handler", (_WorkerHandler,), {"desk": desk, "token": token})
    return start(handler, bind=LOOPBACK, port=port)


class _WorkerHandler(BearerHandler):
    desk: WorkerCommandQueue

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        return self.desk.health() if path == "/health" else self.no_route(path)

    def post(self, path: str, body: bytes) -> Reply:
        match path:
            case "/load":
                return self.desk.load(json.loads(body))
            case "/share":
                return self.desk.share(msgpack.unpackb(body))
            case "/drop":
                return self.desk.drop(int(json.loads(body)["step"]))
            case "/stop":
                return self.desk.stop()
            case _:
                return self.no_route(path)
