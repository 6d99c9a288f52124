"""The HTTP of the trainer's rank 0, and the queue that hands its commands to the training loop.

    GET  /health                    state, world, step, published, checkpoint; always at once
    POST /train                     msgpack; 202 taken (again: 202, nothing happens), 409 wrong step
                                    or another batch
    GET  /train/<step>?wait_s=20    running | done | failed; waits at most wait_s for the end
    GET  /versions/<step>?wait_s=20   the same of writing the step's version
    GET  /log-ratios/<step>         of the newest step's tokens, msgpack; 404 of any other
    POST /accumulate                msgpack; a part of the next step, before the rest of it is there
    GET  /accumulate/<step>/<part>  running | done | failed, as above
    POST /checkpoint                {"ledger": {}} -> {"path"}, or "error": it cannot be written
    POST /stop                      all ranks leave after what they are doing

Every route demands the run's bearer token. A step is ``done`` as soon as its weights are copied,
and the next one may be handed over; its version is written meanwhile (``/versions``). A checkpoint
asked for with it is written after it, and then named in the same answer (asked for again) and in
``/health``. Torch releases the interpreter in its kernels, so these threads answer during a step.
``CommandQueue`` is the only object that threads share.

A step may come in parts: ``/accumulate`` with part 1, 2, ... and then ``/train`` with the last part
and the number of those before it. All trajectories of a group come in the same part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgpack

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.samples import TokenSample, read_samples
from libra_cli.node.batch.shares import WorkerShare, read_shares
from libra_cli.node.command_queue import BaseCommandQueue, IdleCommand, StopCommand
from libra_cli.node.http import (
    Answer,
    Blob,
    HostServer,
    JsonHandler,
    Reply,
    refusal,
    serve_controller,
)

if TYPE_CHECKING:
    from libra_cli.node.weights.versions import VersionOnDisk

MAX_WAIT_S = 60.0
KEPT_RESULTS = 8
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class TrainCommand:
    """Take optimizer step ``step``; with a ledger, write a checkpoint after it."""

    step: int
    samples: tuple[TokenSample, ...]
    """Of the last part, those of shares too."""
    ledger: Mapping[str, Any] | None = None
    shares: tuple[WorkerShare, ...] = ()


@dataclass(frozen=True, slots=True)
class AccumulateCommand:
    """Add the gradients of a part of step ``step``, with the weights of the one before."""

    step: int
    part: int
    samples: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True)
class CheckpointCommand:
    """Write a checkpoint now."""

    ledger: Mapping[str, Any]


WorkCommand: TypeAlias = TrainCommand | AccumulateCommand | CheckpointCommand
Command: TypeAlias = WorkCommand | StopCommand | IdleCommand


@dataclass
class CommandQueue(BaseCommandQueue[WorkCommand]):
    """The trainer's commands and results. Steps are taken in order, each once."""

    world_size: int
    trainer_incarnation: int
    max_len: int
    checkpoint_timeout_s: float = 1800.0
    step: int = 0
    """The last step that is done."""
    accepted: int = 0
    """The last step that was taken; step or step + 1."""
    parts: int = 0
    """Parts of step ``accepted + 1`` that were taken."""
    checkpoint: str = ""
    """The last checkpoint that is complete."""
    published: dict[str, Any] | None = None
    """The newest version: name, version, bytes, published_at."""
    _checkpoints: int = 0
    """Those that are written, and those that could not be."""
    _save_error: str = ""
    """Why the last of them could not be; empty if it could."""
    _results: dict[int, dict[str, Any]] = field(default_factory=dict)
    _versions: dict[int, dict[str, Any]] = field(default_factory=dict)
    _log_ratios: bytes = b""
    """Of the last step that is done, as ``node.batch.log_ratios`` packs them."""
    _accumulated: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    """By step and part, of the newest step that came in parts."""
    _taken: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """What was taken for the newest step and its parts (the step itself: 0), as ``_digest``."""

    # The training loop's side.

    def ready(self, version: VersionOnDisk, checkpoint: str) -> None:
        """The version to start from is published."""
        step = version.version
        with self._changed:
            self.state, self.step, self.accepted, self.checkpoint = "ready", step, step, checkpoint
            self.published = asdict(version)
            self._changed.notify_all()

    def done(self, step: int, metrics: Mapping[str, Any], log_ratios: bytes = b"") -> None:
        """Step ``step`` is taken and its weights are copied."""
        with self._changed:
            self.step, self._log_ratios = step, log_ratios
            self._results[step] = {"state": "done", "metrics": dict(metrics), "checkpoint": ""}
            self._results.pop(step - KEPT_RESULTS, None)
            self._changed.notify_all()

    def version_published(self, version: VersionOnDisk) -> None:
        """The version of a step is complete; told by the thread that has written it."""
        step = version.version
        with self._changed:
            self.published = asdict(version)
            self._versions[step] = {"state": "done", "version": self.published}
            self._versions.pop(step - KEPT_RESULTS, None)
            self._changed.notify_all()

    def accumulated(self, step: int, part: int, metrics: Mapping[str, Any]) -> None:
        """The gradients of a part are added."""
        with self._changed:
            for older in [key for key in self._accumulated if key[0] < step]:
                del self._accumulated[older]
            self._accumulated[step, part] = {"state": "done", "metrics": dict(metrics)}
            self._changed.notify_all()

    def saved(self, step: int, path: str) -> None:
        """A checkpoint is complete."""
        with self._changed:
            self.checkpoint = path
            self._saved(step, {"checkpoint": path}, "")

    def not_saved(self, step: int, reason: str) -> None:
        """A checkpoint could not be written; everything else goes on."""
        with self._changed:
            self._saved(step, {"checkpoint_error": reason}, reason)

    def _saved(self, step: int, news: Mapping[str, str], error: str) -> None:
        self._checkpoints += 1
        self._save_error = error
        if step in self._results:
            self._results[step] |= news
        self._changed.notify_all()

    # The HTTP threads' side.

    def health(self) -> Answer:
        """Tell the controller how the trainer stands."""
        with self._changed:
            return HTTPStatus.OK, {
                "state": self.state,
                "world_size": self.world_size,
                "step": self.step,
                "published": self.published,
                "trainer_incarnation": self.trainer_incarnation,
                "checkpoint": self.checkpoint,
                "error": self.error,
            }

    def train(self, message: Mapping[str, Any]) -> Answer:
        """Take a step, unless it is not the next one.

        Raises:
            TrainerError: it says that another number of parts came before it than did.
        """
        step, parts = int(message["step"]), int(message.get("parts", 0))
        digest = _digest(message)
        refused = self._refusal_now(step, parts, digest)
        if refused:
            return refused
        samples = read_samples(message["trajectories"], self.max_len)
        checkpoint = message.get("checkpoint")
        ledger = checkpoint["ledger"] if checkpoint else None
        command = TrainCommand(
            step, samples, ledger, read_shares(message.get("shares", ()), samples)
        )
        with self._changed:
            # Reading took time, and the same step may have come twice.
            refused = self._refusal(step, parts, digest)
            if refused:
                return refused
            self.accepted, self.parts = step, 0
            self._taken = {(step, 0): digest}
            self._add(command)
        return HTTPStatus.ACCEPTED, {"state": "running"}

    def accumulate(self, message: Mapping[str, Any]) -> Answer:
        """Take a part of the next step, unless it is not the next part."""
        step, part = int(message["step"]), int(message["part"])
        digest = _digest(message)
        with self._changed:
            refused = self._part_refusal(step, part, digest)
        if refused:
            return refused
        command = AccumulateCommand(step, part, read_samples(message["trajectories"], self.max_len))
        with self._changed:
            refused = self._part_refusal(step, part, digest)
            if refused:
                return refused
            self.parts = part
            self._taken[step, part] = digest
            self._add(command)
        return HTTPStatus.ACCEPTED, {"state": "running"}

    def _refusal_now(self, step: int, parts: int, digest: bytes) -> Answer | None:
        with self._changed:
            return self._refusal(step, parts, digest)

    def _refusal(self, step: int, parts: int, digest: bytes) -> Answer | None:
        if unavailable := self._unavailable("trainer"):
            return unavailable
        if step == self.accepted and step > 0:
            return self._known(step, 0, digest)
        if step != self.accepted + 1:
            return self._wrong_step(step)
        if parts != self.parts:
            raise TrainerError(
                f"step {step}: {parts} parts should be accumulated, {self.parts} are: "
                "send the parts again, all of them"
            )
        return None

    def _known(self, step: int, part: int, digest: bytes) -> Answer:
        """What was taken before: again from a controller that goes on where another was killed."""
        if self._taken.get((step, part), digest) == digest:
            return HTTPStatus.ACCEPTED, {"state": "running"}
        what = f"part {part} of step {step}" if part else f"step {step}"
        return refusal(HTTPStatus.CONFLICT, f"{what} was taken with another batch")

    def _part_refusal(self, step: int, part: int, digest: bytes) -> Answer | None:
        if unavailable := self._unavailable("trainer"):
            return unavailable
        if step != self.accepted + 1:
            return self._wrong_step(step)
        if 0 < part <= self.parts:
            return self._known(step, part, digest)
        if part != self.parts + 1:
            return refusal(
                HTTPStatus.CONFLICT,
                f"part {part} of step {step} was sent, the next one is {self.parts + 1}",
            )
        return None

    def _wrong_step(self, step: int) -> Answer:
        return refusal(
            HTTPStatus.CONFLICT, f"step {step} was sent, the next one is {self.accepted + 1}"
        )

    def result(self, step: int, wait_s: float) -> Answer:
        """How a step ended, waiting a while for it."""
        with self._changed:
            return self._wait(
                self._results, step, wait_s, lambda: step == self.accepted, f"step {step}"
            )

    def log_ratios(self, step: int) -> Reply:
        """The log ratios of the tokens of the last step that is done."""
        with self._changed:
            if step != self.step or not self._log_ratios:
                return refusal(HTTPStatus.NOT_FOUND, f"there are no log-ratios of step {step}")
            return HTTPStatus.OK, Blob(self._log_ratios)

    def version_result(self, step: int, wait_s: float) -> Answer:
        """Whether a step's version is complete, waiting a while for it."""
        with self._changed:
            return self._wait(
                self._versions, step, wait_s, lambda: step <= self.accepted, f"step {step}"
            )

    def part_result(self, step: int, part: int, wait_s: float) -> Answer:
        """How a part ended, waiting a while for it."""
        with self._changed:
            return self._wait(
                self._accumulated,
                (step, part),
                wait_s,
                lambda: step == self.accepted + 1 and 0 < part <= self.parts,
                f"part {part} of step {step}",
            )

    def _wait(
        self,
        results: Mapping[_Key, dict[str, Any]],
        key: _Key,
        wait_s: float,
        sent: Callable[[], bool],
        name: str,
    ) -> Answer:
        self._changed.wait_for(
            lambda: key in results or self.state == "failed", min(wait_s, MAX_WAIT_S)
        )
        if key in results:
            return HTTPStatus.OK, dict(results[key])
        if self.state == "failed":
            return HTTPStatus.OK, {"state": "failed", "error": self.error}
        if sent():
            return HTTPStatus.OK, {"state": "running"}
        return refusal(HTTPStatus.NOT_FOUND, f"{name} was never sent")

    def save(self, ledger: Mapping[str, Any]) -> Answer:
        """A checkpoint of now; answers when it is complete."""
        with self._changed:
            if self.state != "ready":
                return refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"trainer is {self.state}")
            # Those already asked for come first.
            queued = sum(
                isinstance(command, CheckpointCommand)
                or (isinstance(command, TrainCommand) and command.ledger is not None)
                for command in self._commands
            )
            wanted = self._checkpoints + queued + 1
            self._add(CheckpointCommand(ledger))
            self._changed.wait_for(
                lambda: self._checkpoints >= wanted or self.state == "failed",
                self.checkpoint_timeout_s,
            )
            if self.state == "failed":
                return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, self.error)
            if self._checkpoints < wanted:
                return refusal(
                    HTTPStatus.GATEWAY_TIMEOUT,
                    f"no checkpoint within {self.checkpoint_timeout_s:.0f} s",
                )
            if self._save_error:
                return HTTPStatus.OK, {"path": "", "error": self._save_error}
            return HTTPStatus.OK, {"path": self.checkpoint}


def _digest(message: Mapping[str, Any]) -> bytes:
    """A digest of what a step, or a part of one, is taken on."""
    return hashlib.blake2b(msgpack.packb(message["trajectories"]), digest_size=16).digest()


def serve(queue: CommandQueue, *, path: str, token: str) -> HostServer:
    """Answer on a Unix socket until ``shutdown()``; returns at once."""
    return serve_controller(_TrainerHandler, path=path, token=token, queue=queue)


class _TrainerHandler(JsonHandler):
    queue: CommandQueue

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        wait_s = float(query.get("wait_s", "0"))
        if not isfinite(wait_s):  # nobody waits until NaN
            raise ValueError(f"wait_s={wait_s}")
        match path.split("/")[1:]:
            case ["health"]:
                return self.queue.health()
            case ["train", step]:
                return self.queue.result(int(step), wait_s)
            case ["versions", step]:
                return self.queue.version_result(int(step), wait_s)
            case ["log-ratios", step]:
                return self.queue.log_ratios(int(step))
            case ["accumulate", step, part]:
                return self.queue.part_result(int(step), int(part), wait_s)
            case _:
                return self.no_route(path)

    def post(self, path: str, body: bytes) -> Answer:
        match path:
            case "/train":
                return self.queue.train(msgpack.unpackb(body))
            case "/accumulate":
                return self.queue.accumulate(msgpack.unpackb(body))
            case "/checkpoint":
                return self.queue.save(json.loads(body)["ledger"])
            case "/stop":
                return self.queue.stop()
            case _:
                return self.no_route(path)
