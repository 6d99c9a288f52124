"""What the controller orders of a gradient worker's rank 0, and the queue of it for the ranks.

    operation    order                   answer
    ready        {}                      {} when every rank is there
    load         directory, name,        gap and load_s, when the version is loaded; the share under
                 trainer_incarnation     way, which nobody can want any more, is dropped before
    share        step, version,          {} once it is taken (again: nothing happens); refused if
                 incarnation,            something else is loaded or being done
                 trainer_incarnation,
                 trajectories

Those of ``node.command_queue`` come on top; ``stop`` drops the share that is computed. The
trainer's ranks read gradients from ``gradient.server``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.samples import TokenSample, read_samples
from libra_cli.node.command_queue import BaseCommandQueue, IdleCommand, Later, StopCommand, taken
from libra_cli.node.control import Answer
from libra_cli.node.gradient.server import GradientStore


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Load a weight version and compute with it from now on."""

    directory: str
    name: str
    """Name of the version, for example ``v000007-e0``."""
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
    """The worker's commands and results. It computes one share at a time."""

    max_len: int
    store: GradientStore
    version: str = ""
    """Name of the version that is loaded; empty while none is, or another is to be."""
    trainer_incarnation: int = -1
    """Incarnation of the trainer that published the loaded version."""
    computing: int | None = None
    """The step of the share under way, dropped or not."""
    _load: LoadCommand | None = None
    """The last load that was asked for; None before the first."""
    _loaded: Answer | None = None
    _problem: str = ""
    """Why that version could not be loaded; empty if it could or is not yet."""

    # The computing side.

    def ready(self) -> None:
        """Record that the model is there and commands can be taken."""
        with self._changed:
            self.state = "ready"
            self._tell()

    def fail(self, error: str) -> None:
        """Record that the worker can do no more, drop its share, and tell everybody who waits."""
        self.store.drop(self.store.step, error)
        super().fail(error)

    def loaded(self, load: LoadCommand, gap: float, load_s: float) -> None:
        """Record that a version is in place.

        ``gap`` is the mean absolute difference of log-probabilities on its probe, in nats.
        """
        with self._changed:
            if load == self._load:
                self.version, self.trainer_incarnation = load.name, load.trainer_incarnation
                self._loaded = {"gap": gap, "load_s": load_s}
                self._tell()

    def not_loaded(self, load: LoadCommand, problem: str) -> None:
        """Record why a version cannot be loaded, unless another was asked for meanwhile."""
        with self._changed:
            if load == self._load:
                self._problem = problem
                self._tell()

    def computed(self) -> None:
        """Record that the share's computation has ended, complete or not."""
        with self._changed:
            self.computing = None

    # The control thread's side.

    def take(self, operation: str, order: Mapping[str, Any]) -> Later:
        """Carry out an order, or queue it; see ``BaseCommandQueue``."""
        match operation:
            case "load":
                return self._queue_load(order)
            case "share":
                return self._queue_share(order)
            case _:
                return super().take(operation, order)

    def _queue_load(self, order: Mapping[str, Any]) -> Later:
        """Queue the loading of a version, unless it is under way."""
        name, trainer_incarnation = str(order["name"]), int(order["trainer_incarnation"])
        load = LoadCommand(str(order["directory"]), name, trainer_incarnation)
        with self._changed:
            self._check_available("worker")
            under_way = load == self._load and self._loaded is None and not self._problem
            if not under_way:
                self.store.drop(self.store.step, f"{name} is to be loaded")
                self.version, self._load, self._loaded, self._problem = "", load, None, ""
                self._add(load)
        return self._later(lambda: self._result_of(load))

    def _result_of(self, load: LoadCommand) -> Answer | None:
        if load != self._load:
            raise TrainerError(f"another version than {load.name} was asked for meanwhile")
        if self._problem:
            raise TrainerError(self._problem)
        return self._loaded

    def _queue_share(self, order: Mapping[str, Any]) -> Later:
        """Queue a share, if the version it is for is loaded and no other is under way."""
        step, version = int(order["step"]), str(order["version"])
        wanted = int(order["incarnation"]), int(order["trainer_incarnation"]), version
        with self._changed:
            here = self.store.incarnation, self.trainer_incarnation, self.version
            if wanted != here:
                raise TrainerError(
                    "wanted is incarnation {}, trainer incarnation {}, version {}; ".format(*wanted)
                    + "here is incarnation {}, trainer incarnation {}, version {!r}".format(*here)
                )
            if self.store.has(step, version):
                return taken
            self._check_available("worker")
            if self.computing is not None:
                raise TrainerError(f"busy computing a share of step {self.computing}")
        command = ComputeCommand(step, read_samples(order["trajectories"], self.max_len))
        with self._changed:
            # Before anybody hears that it is taken, so that the trainer's question finds it here.
            self.store.begin(step, version)
            self.computing = step
            self._add(command)
        return taken

    def stop(self) -> None:
        """Queue the end and drop the share that is being computed."""
        self.store.drop(self.store.step, "the worker was stopped")
        super().stop()
