"""The seam of whatever serves the policy during rollout; libra ships vLLM.

A backend is one class without arguments, in two halves. The **pure half** is this protocol: which
process a slot's server is, from the recipe and what is known of the host. The core imports it, so
it imports neither the engine nor anything that does I/O. The **runtime half** is the class that
talks to such a process; ``connection`` is its import path, and
``libra_cli.runtime.rollout.connection`` says what it must do (generate from token ids with
log-probabilities and the weight version of every token, load a version in place, answer a probe).

To add one: a module with both halves, and an entry point of group ``libra.rollout_backends`` that
names the pure half. A recipe chooses it with ``rollout: {backend: NAME}``. What a run needs of any
engine is in ``libra_cli.core.launch.vllm``, with the reason for every flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from libra_cli.config.plugins import PluginGroup
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.architecture import Architecture
from libra_cli.core.launch.joined_slots import part_slots
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import HostFacts, ProcessSpec, process_of
from libra_cli.core.types import Bucket, Slot
from libra_cli.plugins.finding import find

ROLLOUT_BACKENDS = PluginGroup(
    "libra.rollout_backends", "rollout backend", {"vllm": "libra_cli.core.launch.vllm:Vllm"}
)


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """The arguments of a rollout server's start: its slot, host, shape and model."""

    slot: Slot
    bucket: Bucket
    facts: HostFacts
    socket: str
    """Path of the Unix socket on which it answers the controller."""
    seed: int
    """The server's own seed: two servers with one seed may give two
    members of a group the same tokens.
    """
    model_dir: str
    shape: Architecture | None = None
    """The sizes of the model, if they are known; the KV cache of a shared memory follows."""


class RolloutBackend(Protocol):
    """The pure half of a rollout backend: the process of a slot's server."""

    packages: tuple[str, ...]
    """Python packages that a host needs to serve."""
    connection: str
    """Import path of the runtime half, a ``ServerConnection``."""

    def server(self, recipe: Recipe, launch: ServerLaunch) -> ProcessSpec:
        """The server process of a slot, named ``process_of(slot.id)``.

        It must listen on the Unix socket ``launch.socket`` (``node.unix_socket`` makes one that
        only this user can reach), answer nobody who does not show the run's token, and run at most
        ``bucket.max_num_seqs`` requests at a time on ``bucket.tensor_parallel`` GPUs.
        """
        ...


@cache
def rollout_backend(name: str) -> RolloutBackend:
    """The pure half of the backend of that name. Raises PluginError if there is none."""
    backend: RolloutBackend = find(ROLLOUT_BACKENDS, name)()
    return backend


def server_process(
    recipe: Recipe,
    slot: Slot,
    bucket: Bucket,
    facts: HostFacts,
    *,
    model_dir: str,
    shape: Architecture | None = None,
) -> ProcessSpec:
    """The server of a slot, as the recipe's backend makes it."""
    seed = recipe.run.seed * 10_000 + _position(recipe, slot)
    socket = facts.socket_of(process_of(slot.id))
    launch = ServerLaunch(slot, bucket, facts, socket, seed, model_dir, shape)
    return rollout_backend(recipe.rollout.backend).server(recipe, launch)


def _position(recipe: Recipe, slot: Slot) -> int:
    """A number that no other server has at the same time: of the slot, or of its first GPU."""
    if not recipe.has_open_nodes:
        return [other.id for other in slots_of(recipe)].index(part_slots(slot.id)[0])
    nodes = [node.name for node in recipe.nodes]
    before = recipe.nodes[: nodes.index(slot.node)]
    return sum(node.gpus for node in before) + slot.gpus[0]
