"""What a first recipe says, chosen from what hosts and a model's directory have told.

    two GPUs or more, a model   hosts with GPUs are left to the planner; all weights rather than an
                                adapter, and the longest context, that fit by ``core.costs.memory``
    two GPUs or more, no model  the small model that libra builds, on two of them
    one GPU                     a server and the trainer share it; the largest share for the trainer
                                with which both fit
    none                        the CPUs of one host; of several, the first trains

Guarantee: what is chosen for GPUs whose memory is known fits them by the plan that the run would
begin with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from libra_cli.app.first_plan import explained_first_plan
from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe, ShareSpec
from libra_cli.core.costs.architecture import Architecture, architecture_of
from libra_cli.core.costs.memory import GIB, server_contexts
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.launch.process import dtype_of
from libra_cli.core.launch.sharding import RankConditions, dp_shard_size
from libra_cli.core.launch.shares import rank_gpu_gib, server_room_gib
from libra_cli.core.launch.trainer_backend import ranks_per_node
from libra_cli.core.types import Plan, Slot
from libra_cli.runtime.doctor.discovery import FoundHost

LENGTHS = (8192, 4096, 2048)
"""Tokens of a trajectory, the longest first, that a first recipe allows."""
LENGTH_ON_CPUS = 1024
SHARES = tuple(
    ShareSpec(rollout=rollout, train=train)
    for rollout, train in ((0.3, 0.6), (0.4, 0.5), (0.5, 0.4), (0.6, 0.3))
)
"""Shares of one GPU to try, of which the trainer needs the most for all weights of a small model
and the server for an adapter of a larger one; a tenth is left for CUDA and a screen."""
LEAST_CONTEXTS = 4
"""Whole contexts that the KV cache of each server has to hold."""
STATE_BYTES_ON_CPUS = 20
"""Bytes of a parameter on a host without GPUs: weight, gradient and two moments of the trainer, and
the server's weight, all float32."""
USABLE_ON_CPUS = 0.7
"""Share of a host's memory for these; the rest is for activations, the KV cache and others."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """A node of the recipe; ``told`` is what is said beside it."""

    host: str
    user: str | None
    gpus: int
    slots: int | None
    pool: tuple[str, ...]
    told: str
    share: bool = False
    """Whether a server and the trainer share its one GPU."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What config.json and the chat template in a model's directory say of the model."""

    path: str
    context: int | None
    """Tokens, by ``max_position_embeddings``; None where config.json has none."""
    shape: Architecture | None
    notes: tuple[str, ...]
    """What its chat template can and cannot, and what is not known of it, in sentences."""


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """How long trajectories may be, and what is trained."""

    max_len: int
    micro_batch_tokens: int
    lora: bool
    share: ShareSpec = SHARES[0]
    """Shares of the GPU, where server and trainer have one together."""


def model_of(path: str, config: Mapping[str, Any], notes: Sequence[str]) -> FoundModel:
    """Read the sizes in a ``config.json``.

    Raises:
        MixtureRefused: it is a mixture of experts, for which nothing can be chosen.
    """
    inside = config.get("text_config") or config
    context = inside.get("max_position_embeddings")
    refuse_mixture(path, config)
    shape, said = None, tuple(" ".join(note.split()) for note in notes)
    try:
        shape = architecture_of(config, path)
        said = (f"{shape.parameters / 1e9:.1f} billion parameters", *said)
    except LibraError as error:
        said = (f"what its memory goes to is not known: {error}", *said)
    return FoundModel(path, context if isinstance(context, int) else None, shape, said)


# -- hosts -----------------------------------------------------------------------------------------


def nodes_for(found: Sequence[FoundHost], *, small: bool) -> tuple[NodeChoice, ...]:
    """Choose the nodes of a recipe; ``small`` is for one that trains libra's small model."""
    reached = [one for one in found if not one.error]
    with_gpus = [one for one in reached if one.gpus]
    if sum(len(one.gpus) for one in with_gpus) > 1:
        enough = next((one for one in with_gpus if small and len(one.gpus) > 1), None)
        if enough is not None:
            return (_node(enough, gpus=2, slots=2, pool=("rollout", "train")),)
        return tuple(_node(one, gpus=len(one.gpus)) for one in with_gpus[: 2 if small else None])
    if with_gpus:
        return (replace(_node(with_gpus[0], gpus=1), share=True),)
    if len(reached) == 1:
        return (_node(reached[0], slots=2, pool=("rollout", "train")),)
    first, *others = reached
    return (_node(first, pool=("train",)), *(_node(one, pool=("rollout",)) for one in others))


def _node(
    one: FoundHost, *, gpus: int = 0, slots: int | None = None, pool: tuple[str, ...] = ()
) -> NodeChoice:
    return NodeChoice(one.node.host, one.node.user, gpus, slots, pool, in_words(one))


def in_words(one: FoundHost) -> str:
    """Write a host's GPUs, CPUs and memory for a person, with the GPUs that are in use."""
    told = [f"{len(one.gpus)} x {one.gpus[0].name}"] if one.gpus else []
    if one.gpus and one.gpus[0].gib:
        told[0] += f" of {min(gpu.gib for gpu in one.gpus):.0f} GiB"
    if one.gpus_in_use:
        told.append(f"{one.gpus_in_use} of them IN USE")
    return ", ".join([*told, f"{one.cpus} CPUs", f"{one.memory_gib:.0f} GiB of memory"])


def left_out(found: Sequence[FoundHost], nodes: Sequence[NodeChoice]) -> Iterator[str]:
    """Say why a host is not in the recipe."""
    chosen = {node.host: node for node in nodes}
    for one in found:
        name, node = one.node.host, chosen.get(one.node.host)
        if one.error:
            yield f"{name} did not answer: {one.error}"
        elif node is None:
            why = "two GPUs are enough for the small model" if one.gpus else "it has no GPU"
            yield f"{name} is left out ({in_words(one)}): {why}"


# -- sizes -----------------------------------------------------------------------------------------


def sizes_for(model: FoundModel, *, on_gpus: bool, shared: bool = False) -> Iterator[SizeChoice]:
    """Yield sizes to try, the best first: any size that trains all weights comes before LoRA, and
    longer trajectories come before shorter ones; each with all shares of a GPU that is ``shared``.
    """
    for size in _sizes(model, on_gpus=on_gpus):
        yield from (replace(size, share=share) for share in SHARES[: None if shared else 1])


def _sizes(model: FoundModel, *, on_gpus: bool) -> Iterator[SizeChoice]:
    context = model.context or LENGTHS[-1]
    if not on_gpus:
        length = min(context, LENGTH_ON_CPUS)
        yield from (SizeChoice(length, length, lora) for lora in (False, True))
        return
    lengths = [one for one in LENGTHS if one <= context] or [context]
    for lora in (False, True):
        for length in lengths:
            yield SizeChoice(length, 2 * length, lora)
            yield SizeChoice(length, length, lora)


def fits(recipe: Recipe, shape: Architecture, found: Sequence[FoundHost]) -> bool:
    """Whether trainer and servers of the plan that the run would begin with fit."""
    hosts = [one for one in found if one.node.host in {node.host for node in recipe.nodes}]
    shape = shape.with_adapter(recipe.training.lora)
    if not any(node.gpus for node in recipe.nodes):
        wanted = STATE_BYTES_ON_CPUS * shape.trained + 8 * (shape.parameters - shape.trained)
        if len(hosts) > 1:  # servers are elsewhere
            wanted = max(wanted - 4 * shape.parameters, 4 * shape.parameters)
        return wanted / GIB <= USABLE_ON_CPUS * min(one.memory_gib for one in hosts)
    gpus = [gpu for one in hosts for gpu in one.gpus]
    size = min(gpu.gib for gpu in gpus)
    if not size:  # nvidia-smi does not tell
        return True
    plan = explained_first_plan(recipe, frozenset(gpu.name for gpu in gpus))
    return _fits_gpus(recipe, shape, (plan.plan, plan.slots), size)


def _fits_gpus(
    recipe: Recipe, shape: Architecture, placed: tuple[Plan, tuple[Slot, ...]], size: float
) -> bool:
    plan, known = placed[0], {slot.id: slot for slot in placed[1]}
    train = [known[slot] for slot in plan.train]
    ranks = ranks_per_node(train)
    conditions = RankConditions.of(
        recipe, on_gpu=True, dtype=dtype_of(recipe.model, train), ranks=sum(ranks.values())
    )
    shards = dp_shard_size(recipe.training, ranks, host_fits=False)
    if not conditions.fit(shape, shards, min(rank_gpu_gib(recipe.node(n), size) for n in ranks)):
        return False
    rooms = {
        slot: server_room_gib(
            recipe.node(known[slot].node), recipe.rollout.gpu_memory, known[slot].num_devices, size
        )
        for slot, _ in plan.servers
    }
    return all(
        server_contexts(
            shape,
            tensor_parallel=known[slot].num_devices,
            room=room * GIB,
            max_len=recipe.model.max_len,
        )
        >= LEAST_CONTEXTS
        for slot, room in rooms.items()
    )
