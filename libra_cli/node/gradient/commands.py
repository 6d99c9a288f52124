"""The HTTP of a gradient worker's rank 0 on a Unix socket, for the controller.

    GET  /health    state, version, incarnation, step of the last share taken, world; at once
    POST /load      {"directory", "name", "version", "trainer_incarnation"}; when it is loaded
    POST /share     msgpack; 202 taken (again: 202), 409 if something else is loaded or being done
    POST /drop      {"step"}: the share of this step is not wanted any more
    POST /stop      all ranks leave and drop the share that they compute

Every route demands the run's bearer token. The trainer's ranks read gradients from
``gradient.server``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

import msgpack

from libra_cli.node.batch.samples import TokenSample, read_samples
from libra_cli.node.command_queue import BaseCommandQueue, IdleCommand, StopCommand
from libra_cli.node.gradient.server import GradientStore
from libra_cli.node.http import (
    Answer,
    HostServer,
    JsonHandler,
    Reply,
    refusal,
    serve_controller,
)

LOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Load a weight version and compute with it from now on."""

    directory: str
    name: str
    """Name of the version, as in ``v000007-e0``."""
    trainer_incarnation: int
    """Incarnation of the trainer that published the version."""


@dataclass(frozen=True, slots=True)
class ComputeCommand:
    """Compute the gradients of a share of step ``step``."""

    step: int
    samples: tuple[TokenSample, ...]


Command: TypeAlias = LoadCommand | ComputeCommand | StopCommand | IdleCommand


@dataclass
class WorkerCommandQueue(BaseCommandQueue[LoadCommand | ComputeCommand]):
    """The worker's commands and results. It takes one command at a time."""

    world_size: int
    max_len: int
    store: GradientStore
    version: str = ""
    """Name of the version that is loaded; empty while none is, or only a part of one."""
    trainer_incarnation: int = -1
    """Incarnation of the trainer that published the loaded version."""
    busy: str = ""
    """The command under way in words, for whoever asks for another; empty if there is none."""
    load_timeout_s: float = LOAD_TIMEOUT_S
    _loaded: Answer | None = None

    # The computing side.

    def ready(self) -> None:
        """Record that the model is there and commands can be taken."""
        with self._changed:
            self.state = "ready"
            self._changed.notify_all()

    def fail(self, error: str) -> None:
        """Record that the worker can do no more, drop its share, and wake everybody who waits."""
        self.store.drop(self.store.step, error)
        super().fail(error)

    def loaded(self, load: LoadCommand, gap: float, load_s: float) -> None:
        """Record that a version is in place.

        ``gap`` is the mean absolute difference of log-probabilities on its probe, in nats.
        """
        with self._changed:
            self.version, self.trainer_incarnation = load.name, load.trainer_incarnation
            self._loaded = HTTPStatus.OK, {"gap": gap, "load_s": load_s}
            self._rest()

    def not_loaded(self, problem: str) -> None:
        """Record that a version does not fit; ``version`` was forgotten when loading began."""
        with self._changed:
            self._loaded = refusal(HTTPStatus.BAD_REQUEST, problem)
            self._rest()

    def computed(self) -> None:
        """Record that the share's computation has ended, complete or not."""
        with self._changed:
            self._rest()

    def _rest(self) -> None:
        self.busy = ""
        self._changed.notify_all()

    # The HTTP threads' side.

    def health(self) -> Answer:
        """Answer the worker's state at once."""
        with self._changed:
            return HTTPStatus.OK, {
                "state": self.state,
                "error": self.error,
                "version": self.version,
                "incarnation": self.store.incarnation,
                "step": self.store.step,
                "world_size": self.world_size,
            }

    def load(self, message: Mapping[str, Any]) -> Answer:
        """Queue the loading of a version, and answer when it is done."""
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
        """Queue a share, if the version it is for is loaded and no other command is under way."""
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
            # Before anybody hears that it is taken, so that the trainer's question finds it here.
            self.store.begin(step, version)
            self._take(command, f"computing a share of step {step}")
        return HTTPStatus.ACCEPTED, {"state": "running"}

    def _share_refusal(self, step: int, wanted: tuple[int, int, str]) -> Answer | None:
        here = self.store.incarnation, self.trainer_incarnation, self.version
        if wanted != here:
            return refusal(
                HTTPStatus.CONFLICT,
                "wanted is incarnation {}, trainer incarnation {}, version {}; ".format(*wanted)
                + "here is incarnation {}, trainer incarnation {}, version {!r}".format(*here),
            )
        if self.store.has(step, self.version):
            return HTTPStatus.ACCEPTED, {"state": "running"}
        return self._refusal()

    def _refusal(self) -> Answer | None:
        if unavailable := self._unavailable("worker"):
            return unavailable
        if self.busy:
            return refusal(HTTPStatus.CONFLICT, f"busy {self.busy}")
        return None

    def _take(self, command: LoadCommand | ComputeCommand, busy: str) -> None:
        self.busy = busy
        self._add(command)

    def drop(self, step: int) -> Answer:
        """Drop the share of a step; its computation ends after the micro-batch under way."""
        self.store.drop(step, f"the share of step {step} was dropped")
        return HTTPStatus.ACCEPTED, {"state": "dropped"}

    def stop(self) -> Answer:
        """Queue the end and drop the share that is being computed."""
        self.store.drop(self.store.step, "the worker was stopped")
        return super().stop()


def serve(queue: WorkerCommandQueue, *, path: str, token: str) -> HostServer:
    """Answer on a Unix socket until ``shutdown()``; returns at once."""
    return serve_controller(_WorkerHandler, path=path, token=token, queue=queue)


class _WorkerHandler(JsonHandler):
    queue: WorkerCommandQueue

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        return self.queue.health() if path == "/health" else self.no_route(path)

    def post(self, path: str, body: bytes) -> Reply:
        match path:
            case "/load":
                return self.queue.load(json.loads(body))
            case "/share":
                return self.queue.share(msgpack.unpackb(body))
            case "/drop":
                return self.queue.drop(int(json.loads(body)["step"]))
            case "/stop":
                return self.queue.stop()
            case _:
                return self.no_route(path)
