"""What the runtime half of a trainer backend does: how the controller talks to a first rank.

The pure half (``libra_cli.core.launch.trainer_backend``) names two classes by their import paths,
for the trainer and for a gradient worker. Each is made with an incarnation, the endpoint of rank 0
and the run's token. Every method but ``close`` raises TrainerError; of these ``Unreachable`` is the
network's, and the request may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import Accumulate, Train, TrainSample
from libra_cli.core.events import Accumulated, PublishedVersion, StepDone
from libra_cli.core.launch.trainer_backend import TRAINER_BACKENDS, trainer_backend
from libra_cli.core.types import TrajectoryId, WeightVersion
from libra_cli.plugins.finding import find
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.store.images import ShownImage

ImagesOf: TypeAlias = Mapping[TrajectoryId, Sequence[ShownImage]]
"""The images of trajectories that were shown some."""
NO_IMAGES: ImagesOf = {}


class Unreachable(TrainerError):
    """The process gave no answer; the request may be repeated."""


class NotSaved(TrainerError):
    """A checkpoint could not be written; the trainer works on, and another may be asked for."""


class TrainerConnection(Protocol):
    """The trainer. ``patience_s`` is how long it may be out of reach before a request is lost."""

    async def wait_ready(self, *, timeout_s: float) -> PublishedVersion:
        """Return when every rank is there: the version it starts from, published."""
        ...

    async def train(
        self,
        action: Train,
        shares: Sequence[Mapping[str, object]],
        *,
        patience_s: float,
        images: ImagesOf = NO_IMAGES,
    ) -> StepDone:
        """Take one optimizer step on a batch; ``shares`` say where workers' gradients come from,
        ``images`` what trajectories were shown.

        If its version is not published yet, ``wait_published`` is asked next. A trainer that does
        not tell the log-ratios of tokens leaves ``StepDone.log_ratios`` None.
        """
        ...

    async def wait_published(self, step: int, *, patience_s: float) -> PublishedVersion:
        """The version of a step that is done, once it can be fetched."""
        ...

    async def accumulate(
        self, action: Accumulate, *, patience_s: float, images: ImagesOf = NO_IMAGES
    ) -> Accumulated:
        """Add the gradients of a part of a batch."""
        ...

    async def wait_checkpoint(self, step: int, *, patience_s: float) -> str:
        """The path of the checkpoint that was asked for with a step, when it is written.

        Raises ``NotSaved`` if it cannot be.
        """
        ...

    async def checkpoint(self, ledger: dict[str, Any], *, patience_s: float) -> str:
        """Write a checkpoint now; returns its path on rank 0's host, or raises ``NotSaved``."""
        ...

    async def stop(self) -> None:
        """Ask every rank to leave; the agent makes sure that they do."""
        ...

    async def close(self) -> None:
        """Drop the connections; the process itself is not touched."""
        ...


class WorkerConnection(Protocol):
    """What the controller calls of a gradient worker."""

    incarnation: int
    """The number of the slot's assignment as a gradient worker."""

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return when every rank is there."""
        ...

    async def load(self, directory: str, published: PublishedVersion, *, timeout_s: float) -> float:
        """Load a version; returns the gap of its probe to the trainer's, in nats a token."""
        ...

    async def share(self, step: int, held: WeightVersion, samples: Sequence[TrainSample]) -> None:
        """Hand over a share of a step; the trainer fetches what comes of it."""
        ...

    async def close(self) -> None:
        """Drop the connections; the process itself is not touched."""
        ...


class ConnectTrainer(Protocol):
    """Makes the connection to the trainer; the class of a runtime half is one."""

    def __call__(self, incarnation: int, endpoint: Endpoint, token: str) -> TrainerConnection:
        """Open nothing yet: the first request does."""
        ...


class ConnectWorker(Protocol):
    """Makes the connection to a gradient worker; the class of a runtime half is one."""

    def __call__(self, incarnation: int, endpoint: Endpoint, token: str) -> WorkerConnection:
        """Open nothing yet: the first request does."""
        ...


def connect_trainer_with(backend: str) -> ConnectTrainer:
    """The runtime half of the trainer backend of that name. Raises PluginError."""
    connect: ConnectTrainer = find(TRAINER_BACKENDS, trainer_backend(backend).connection)
    return connect


def connect_worker_with(backend: str) -> ConnectWorker:
    """Return what connects a backend to its gradient workers; raises PluginError."""
    connect: ConnectWorker = find(TRAINER_BACKENDS, trainer_backend(backend).worker_connection)
    return connect
