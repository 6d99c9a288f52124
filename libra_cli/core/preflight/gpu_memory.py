"""Whether what a plan starts fits the GPUs that the hosts have, or their shares of them, by the
law of ``costs.memory``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra_cli.config.errors import LibraError
from libra_cli.core.costs.architecture import Architecture, architecture_of
from libra_cli.core.costs.memory import ASLEEP_GIB, GIB, USABLE_SHARE, server_contexts
from libra_cli.core.launch.joined_slots import slot_named
from libra_cli.core.launch.memory_table import rank_gib, shard_sizes
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.shares import rank_gpu_gib, server_room_gib
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import Finding, Remedy
from libra_cli.core.preflight.needs import draft_head
from libra_cli.core.types import Pool, Slot, node_of

CHECK = "gpu memory"
_SMALLER = "training.lora, training.optimizer: adamw_offload, or a smaller micro_batch_tokens"


def gpu_memory(case: PreflightCase) -> Iterator[Finding]:
    """Check that the trainer's ranks, and one context of the
    greatest length in each server, fit.
    """
    shape = shape_of(case)
    if shape is None:
        return
    known = {slot.id: slot for slot in slots_of(case.recipe)}
    sizes = {
        node.name: _smallest(gpus.mem_total for gpus in facts.gpus[: node.gpus])
        for node, facts in case.looked()
        if node.gpus
    }
    train = [slot_named(slot, known) for slot in case.plan.train]
    yield from _ranks(case, shape, train, sizes)
    for name, _ in case.plan.servers:
        slot = slot_named(name, known)
        if size := sizes.get(node_of(name), 0.0):
            yield from _server(case, shape, slot, size)
            if case.recipe.rollout.sleep and slot.pool is Pool.HYBRID:
                yield from _beside_a_sleeper(case, shape, slot, size)


def locked_bytes(case: PreflightCase, node: str) -> float:
    """Bytes of a host's memory that its ranks lock for activations (``activation_offload``)."""
    shape = shape_of(case)
    if shape is None or not case.recipe.training.activation_offload:
        return 0.0
    known = {slot.id: slot for slot in slots_of(case.recipe)}
    gpus = {node.name: facts.gpus[: node.gpus] for node, facts in case.looked()}
    train = [slot_named(slot, known) for slot in case.plan.train]
    room = min(_smallest(gpu.mem_total for gpu in gpus.get(slot.node, ())) for slot in train)
    # Of two ways to share a replica it is not known here which is taken.
    sizes = shard_sizes(case.recipe, train)
    most = max(rank_gib(case.recipe, shape, train, shards, room).locked for shards in sizes)
    locked = most * sum(slot.num_devices for slot in train if slot.node == node)
    for worker in (slot_named(slot, known) for slot in case.plan.gradient):
        if worker.node == node:
            own = _smallest(gpu.mem_total for gpu in gpus.get(node, ()))
            ranks = worker.num_devices
            locked += ranks * rank_gib(case.recipe, shape, [worker], ranks, own).locked
    return locked * GIB


def shape_of(case: PreflightCase) -> Architecture | None:
    """Return the sizes of the model, with its adapter; None if they are not known."""
    if case.model is None:
        return None
    try:
        found = architecture_of(case.model.config, case.recipe.model.path or "the model")
    except LibraError:
        return None
    return found.with_adapter(case.recipe.training.lora)


def _smallest(sizes: Iterable[int]) -> float:
    """Return the GiB of the smallest GPU; 0 where no host's is known."""
    return min(sizes, default=0) / GIB


def _ranks(
    case: PreflightCase, shape: Architecture, train: list[Slot], sizes: dict[str, float]
) -> Iterator[Finding]:
    recipe = case.recipe
    rooms = {
        rank_gpu_gib(recipe.node(slot.node), sizes.get(slot.node, 0.0)): slot for slot in train
    }
    room = min(rooms, default=0.0)
    if not room:
        return
    node = recipe.node(rooms[room].node)
    has = f"{sizes[node.name]:.0f}"
    if node.share is not None:
        has = f"{node.share.train:g} of {has}"
    # Of two ways to share a replica the one that needs less is taken where the other does not fit.
    need = min(
        rank_gib(case.recipe, shape, train, shards, room).gpu
        for shards in shard_sizes(case.recipe, train)
    )
    if need <= USABLE_SHARE * room:
        yield Finding(CHECK, train[0].node, "fine", f"a rank takes {need:.0f} of {has} GiB")
        return
    yield Finding(
        CHECK,
        train[0].node,
        "warns",
        f"a rank of the trainer takes about {need:.0f} GiB, its GPU has {has}",
        "memory would run out in the first long step",
        Remedy(
            "person",
            "train on more GPUs, lower training.micro_batch_tokens, or set "
            "training.activation_checkpointing: full, training.lora or training.cp_size"
            if node.share is None
            else f"give it a larger share (nodes[].share.train), or set {_SMALLER}",
        ),
    )


def _beside_a_sleeper(
    case: PreflightCase, shape: Architecture, slot: Slot, size: float
) -> Iterator[Finding]:
    """Whether a gradient worker of the slot has room beside what its sleeping server keeps."""
    need = rank_gib(case.recipe, shape, [slot], slot.num_devices, size).gpu
    if need <= USABLE_SHARE * size < need + ASLEEP_GIB:
        yield Finding(
            CHECK,
            slot.node,
            "warns",
            f"a gradient worker on {slot.id} takes about {need:.0f} of {size:.0f} GiB, and its "
            f"sleeping server keeps {ASLEEP_GIB:.0f}",
            "memory would run out in the first long step",
            Remedy("person", "leave rollout.sleep out, or lower training.micro_batch_tokens"),
        )


def _server(case: PreflightCase, shape: Architecture, slot: Slot, size: float) -> Iterator[Finding]:
    recipe = case.recipe
    node = recipe.node(slot.node)
    room = server_room_gib(node, recipe.rollout.gpu_memory, slot.num_devices, size)
    has = f"{size:.0f}" if node.share is None else f"{node.share.rollout:g} of {size:.0f}"
    contexts = server_contexts(
        shape,
        tensor_parallel=slot.num_devices,
        room=room * GIB,
        max_len=recipe.model.max_len,
        quantization=recipe.rollout.quantization,
        head=draft_head(recipe.rollout.speculative, shape, case.model, case.head_files),
    )
    if contexts >= 1:
        yield Finding(CHECK, slot.node, "fine", f"{slot.id} holds {contexts:,.0f} contexts")
        return
    yield Finding(
        CHECK,
        slot.node,
        "warns",
        f"{slot.id} of {has} GiB has no room for a context of {recipe.model.max_len:,} tokens",
        "the server would not start",
        Remedy(
            "person",
            "give the slot more GPUs, raise rollout.gpu_memory, or lower model.max_len"
            if node.share is None
            else "give it a larger share (nodes[].share.rollout), or lower model.max_len",
        ),
    )
