"""The seam of whatever trains the policy; libra ships its own trainer under accelerate's launcher.

A backend is one class without arguments, in two halves. The **pure half** is this protocol: which
processes the trainer and a gradient worker are, and which shapes of a trainer cannot be started.
The core imports it, so it imports neither torch nor anything that does I/O. The **runtime half**
are the classes that talk to the first rank of each; ``connection`` and ``worker_connection`` are
their import paths, and ``libra_cli.runtime.trainer.connection`` says what they must do.

To add one: a module with both halves, and an entry point of group ``libra.trainer_backends`` that
names the pure half. A recipe chooses it with ``training: {backend: NAME}``. A backend that only
launches libra's own ranks in another way is a ``libra_cli.core.launch.trainer.NativeTrainer`` with
two methods; its runtime half is there already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from libra_cli.config.plugins import PluginGroup
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.architecture import Architecture
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.types import Slot
from libra_cli.plugins.finding import find

TRAINER_BACKENDS = PluginGroup(
    "libra.trainer_backends",
    "trainer backend",
    {"accelerate": "libra_cli.core.launch.accelerate:Accelerate"},
)


@dataclass(frozen=True, slots=True)
class TrainerLaunch:
    """The arguments of the trainer's start. The node of the first slot holds rank 0."""

    train: tuple[Slot, ...]
    facts: Mapping[str, HostFacts]
    """The facts of every train node, by its name; ``model_dirs`` and ``resume`` have the same keys.
    """
    run_id: str
    rendezvous_port: int
    """The port at which the ranks meet, on the first node."""
    model_dirs: Mapping[str, str]
    trainer_incarnation: int
    resume: Mapping[str, str] | None = None
    """A checkpoint to go on from: each node's directory of it."""
    shape: Architecture | None = None
    """The sizes of the model, if they are known; whether a host holds a replica follows from it."""
    checkpoint_urls: tuple[str, ...] = ()
    """URLs from which a node's ranks fetch the files that its directory
    lacks (``node.checkpoints.server``).
    """


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """The arguments of a gradient worker's start: a world of
    its own on one slot, one rank a GPU.
    """

    slot: Slot
    facts: HostFacts
    run_id: str
    incarnation: int
    ports: Mapping[str, int]
    """The ports of its node, by the names of ``ports_needed``; the worker's are ``worker_ports``.
    """
    model_dir: str
    shape: Architecture | None = None
    """The sizes of the model, if they are known; how many ranks share a forward pass follows."""


class TrainerBackend(Protocol):
    """The pure half of a trainer backend: the processes of the trainer and of gradient workers."""

    packages: tuple[str, ...]
    """Python packages that a host needs to train."""
    connection: str
    """Import path of the runtime half for the trainer, a ``TrainerConnection``."""
    worker_connection: str
    """Import path of the runtime half for a gradient worker, a ``WorkerConnection``."""

    def refuses(self, ranks: Mapping[str, int]) -> str:
        """Why a trainer with so many ranks on each node cannot be started; empty if it can."""
        ...

    def trainer(self, recipe: Recipe, launch: TrainerLaunch) -> tuple[ProcessSpec, ...]:
        """The launchers of the trainer: one a node, called ``trainer_of(machine)``, in order.

        Rank 0 answers the controller on its node's ``facts.socket_of(trainer_of(0))``.
        """
        ...

    def gradient_worker(self, recipe: Recipe, launch: WorkerLaunch) -> ProcessSpec:
        """The launcher of a gradient worker, called ``worker_of(slot.id)``.

        Rank 0 answers the controller on ``facts.socket_of(worker_of(slot.id))``.
        """
        ...


@cache
def trainer_backend(name: str) -> TrainerBackend:
    """The pure half of the backend of that name. Raises PluginError if there is none."""
    backend: TrainerBackend = find(TRAINER_BACKENDS, name)()
    return backend


def ranks_per_node(train: Iterable[Slot]) -> dict[str, int]:
    """Ranks of a trainer on each node of its slots: one a GPU, one a slot where there are none."""
    counts: Counter[str] = Counter()
    for slot in train:
        counts[slot.node] += slot.num_devices
    return dict(counts)


def trainer_processes(recipe: Recipe, launch: TrainerLaunch) -> tuple[ProcessSpec, ...]:
    """The trainer's launchers, as the recipe's backend makes them."""
    return trainer_backend(recipe.training.backend).trainer(recipe, launch)


def worker_process(recipe: Recipe, launch: WorkerLaunch) -> ProcessSpec:
    """A gradient worker's launcher, as the recipe's backend makes it."""
    return trainer_backend(recipe.training.backend).gradient_worker(recipe, launch)
