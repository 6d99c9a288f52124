"""What the controller orders of the trainer's rank 0, and the queue of it for the training loop.

    operation    order                  answer
    ready        {}                     published: the version to start from
    train        step, trajectories,    {} once it is taken; refused if it is not the next step, or
                 parts, shares,         was taken with another batch
                 checkpoint
    accumulate   step, part,            the same of a part of the next step, before the rest of it
                 trajectories           is there
    done         step                   metrics, when the weights of the step are copied
    accumulated  step, part             metrics, when the gradients of the part are added
    published    step                   when the version of the step is complete: name, version,
                                        bytes, published_at
    saved        step                   path, or error, of the checkpoint asked for with the step
    log_ratios   step                   packed: of the newest step's tokens; refused of any other
    checkpoint   ledger, id             path, or error, when one of now is written; the same id
                                        again asks for that one

Those of ``node.command_queue`` come on top. A step that is done may be followed by the next one
while its version is written. What is told of a step is kept until ``KEPT_STEPS`` later ones have
news. Torch releases the interpreter in its kernels, so the control thread answers during a step.

A step may come in parts: ``accumulate`` with part 1, 2, ... and then ``train`` with the last part
and the number of those before it. All trajectories of a group come in the same part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.samples import TokenSample, read_samples
from libra_cli.node.batch.shares import WorkerShare, read_shares
from libra_cli.node.command_queue import BaseCommandQueue, IdleCommand, Later, StopCommand, taken
from libra_cli.node.control import Answer

if TYPE_CHECKING:
    from libra_cli.node.weights.versions import VersionOnDisk

KEPT_STEPS = 8


@dataclass(frozen=True, slots=True)
class TrainCommand:
    """Take optimizer step ``step``; with a ledger, write a checkpoint after it."""

    step: int
    samples: tuple[TokenSample, ...]
    """Samples of the step's last part, those of shares too."""
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
    """Tells the ranks to write a checkpoint of the step that was taken last."""

    ledger: Mapping[str, Any]


WorkCommand: TypeAlias = TrainCommand | AccumulateCommand | CheckpointCommand
Command: TypeAlias = WorkCommand | StopCommand | IdleCommand


@dataclass
class CommandQueue(BaseCommandQueue[WorkCommand]):
    """The trainer's commands and results. Steps are taken in order, each once."""

    max_len: int
    step: int = 0
    """The last step that is done, or at first the one to start from."""
    accepted: int = 0
    """The last step that was taken; step or step + 1."""
    parts: int = 0
    """Parts of step ``accepted + 1`` that were taken."""
    began_at: int = 0
    """The step to start from, of which there is no news."""
    published: Answer = field(default_factory=dict)
    """The version to start from: name, version, bytes, published_at."""
    _news: dict[tuple[str, int, int], Answer] = field(default_factory=dict)
    """The answers to ``done``, ``accumulated``, ``published`` and ``saved``, by step and part."""
    _log_ratios: bytes = b""
    """Log-ratios of the last step that is done, as ``node.batch.log_ratios`` packs them."""
    _taken: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """What was taken for the newest steps and their parts (the step itself: 0), as ``_digest``."""
    _checkpoints: int = 0
    """Number of ``checkpoint`` orders that have come."""
    _ordered: tuple[str, int] = ("", 0)
    """The id of the last ``checkpoint`` order, and its number."""
    _written: dict[int, Answer] = field(default_factory=dict)
    """The answer to each of these orders that is carried out, by its number from 1 on."""

    # The training loop's side.

    def ready(self, version: VersionOnDisk) -> None:
        """Record the published version to start from, with which the trainer is ready."""
        with self._changed:
            self.state, self.published = "ready", asdict(version)
            self.step = self.accepted = self.began_at = version.version
            self._tell()

    def done(self, step: int, metrics: Mapping[str, Any], log_ratios: bytes = b"") -> None:
        """Record the metrics of a step that is taken and whose weights are copied."""
        with self._changed:
            self.step, self._log_ratios = step, log_ratios
            self._tell_news("done", step, {"metrics": dict(metrics)})

    def version_published(self, version: VersionOnDisk) -> None:
        """Record that a step's version is complete; the thread that has written it calls this."""
        self._tell_news("published", version.version, asdict(version))

    def accumulated(self, step: int, part: int, metrics: Mapping[str, Any]) -> None:
        """Record that the gradients of a part are added, with its metrics."""
        self._tell_news("accumulated", step, {"metrics": dict(metrics)}, part)

    def saved(self, step: int, path: str) -> None:
        """Record the path of the checkpoint that a step was asked for."""
        self._tell_saved(step, {"path": path})

    def not_saved(self, step: int, reason: str) -> None:
        """Record why a step's checkpoint could not be written; everything else goes on."""
        self._tell_saved(step, {"error": reason})

    def _tell_saved(self, step: int, answer: Answer) -> None:
        with self._changed:
            self._written[len(self._written) + 1] = answer
            self._tell_news("saved", step, answer)

    def _tell_news(self, what: str, step: int, answer: Answer, part: int = 0) -> None:
        with self._changed:
            for old in [key for key in self._news if key[1] <= step - KEPT_STEPS]:
                del self._news[old]
            self._news[what, step, part] = answer
            self._tell()

    # The control thread's side.

    def take(self, operation: str, order: Mapping[str, Any]) -> Later:
        """Carry out an order, or queue it; see ``BaseCommandQueue``."""
        match operation:
            case "train":
                return self._train(order)
            case "accumulate":
                return self._accumulate(order)
            case "checkpoint":
                return self._save(order["ledger"], str(order.get("id", "")))
            case "log_ratios":
                return self._packed_log_ratios(int(order["step"]))
            case "accumulated":
                return self._await(operation, int(order["step"]), int(order["part"]))
            case "done" | "published" | "saved":
                return self._await(operation, int(order["step"]))
            case _:
                return super().take(operation, order)

    def _about(self) -> Answer:
        return {"published": self.published}

    def _train(self, order: Mapping[str, Any]) -> Later:
        """Take a step, unless it is not the next one."""
        step, parts, digest = int(order["step"]), int(order.get("parts", 0)), _digest(order)
        with self._changed:
            if self._is_known(step, 0, digest):
                return taken
            if step != self.accepted + 1:
                raise self._wrong_step(step)
            if parts != self.parts:
                raise TrainerError(
                    f"step {step}: {parts} parts should be accumulated, {self.parts} are: "
                    "send the parts again, all of them"
                )
        samples = read_samples(order["trajectories"], self.max_len)
        checkpoint = order.get("checkpoint")
        ledger = checkpoint["ledger"] if checkpoint else None
        command = TrainCommand(step, samples, ledger, read_shares(order.get("shares", ()), samples))
        with self._changed:
            self.accepted = step
            self._checkpoints += ledger is not None
            self._queue(command, 0, digest)
        return taken

    def _accumulate(self, order: Mapping[str, Any]) -> Later:
        """Take a part of the next step, unless it is not the next part."""
        step, part, digest = int(order["step"]), int(order["part"]), _digest(order)
        with self._changed:
            if part > 0 and self._is_known(step, part, digest):
                return taken
            if step != self.accepted + 1:
                raise self._wrong_step(step)
            if part != self.parts + 1:
                raise TrainerError(
                    f"part {part} of step {step} was sent, the next one is {self.parts + 1}"
                )
        command = AccumulateCommand(step, part, read_samples(order["trajectories"], self.max_len))
        with self._changed:
            self._queue(command, part, digest)
        return taken

    def _queue(self, command: TrainCommand | AccumulateCommand, part: int, digest: bytes) -> None:
        self.parts = part
        for old in [key for key in self._taken if key[0] < command.step - 1]:
            del self._taken[old]
        self._taken[command.step, part] = digest
        self._add(command)

    def _is_known(self, step: int, part: int, digest: bytes) -> bool:
        """Whether it was taken before: a controller asks again whose connection was lost, or that
        goes on where another was killed."""
        self._check_available("trainer")
        before = self._taken.get((step, part))
        if before not in (None, digest):
            what = f"part {part} of step {step}" if part else f"step {step}"
            raise TrainerError(f"{what} was taken with another batch")
        return before is not None

    def _wrong_step(self, step: int) -> TrainerError:
        return TrainerError(f"step {step} was sent, the next one is {self.accepted + 1}")

    def _await(self, what: str, step: int, part: int = 0) -> Later:
        """Return what gives the news of a step, or of a part of one, once they are there."""

        def find() -> Answer | None:
            found = self._news.get((what, step, part))
            if found is None and not self._is_due(step, part):
                raise TrainerError(f"{what}: step {step} was never sent, or long ago")
            return found

        return self._later(find)

    def _is_due(self, step: int, part: int) -> bool:
        """Say whether news of the step, or of this part of it, is kept or may still come."""
        if part:
            return (step, part) in self._taken
        return max(self.began_at, self.step - KEPT_STEPS) < step <= self.accepted

    def _packed_log_ratios(self, step: int) -> Later:
        """The log-ratios of the tokens of the last step that is done."""
        with self._changed:
            if step != self.step or not self._log_ratios:
                raise TrainerError(f"there are no log-ratios of step {step}")
            answer = {"packed": self._log_ratios}
        return lambda: answer

    def _save(self, ledger: Mapping[str, Any], ordered: str) -> Later:
        """Order a checkpoint, unless this order has come before, and return what gives its path or
        error once it is written."""
        with self._changed:
            self._check_available("trainer")
            before, number = self._ordered
            if not ordered or ordered != before:
                self._checkpoints += 1
                number = self._checkpoints
                self._ordered = ordered, number
                self._add(CheckpointCommand(ledger))
        return self._later(lambda: self._written.get(number))


def _digest(order: Mapping[str, Any]) -> bytes:
    """A digest of what a step, or a part of one, is taken on."""
    return hashlib.blake2b(msgpack.packb(order["trajectories"]), digest_size=16).digest()
