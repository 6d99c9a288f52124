"""For every kind of process of a plan: what its memory goes to, and on which GPUs it fits.

The numbers are those of ``core.costs.memory``. How much memory the GPUs have is not known before
the hosts are asked; without it each line tells the smallest usual size on which the process fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from libra_cli.config.recipe import ModelSpec, NodeSpec, Recipe
from libra_cli.core.costs.architecture import Architecture
from libra_cli.core.costs.draft_heads import HeadSize
from libra_cli.core.costs.memory import (
    CHECKPOINT_BYTES,
    GIB,
    NO_MOMENTS,
    USABLE_SHARE,
    served_bytes,
    server_contexts,
)
from libra_cli.core.launch.process import NUMBER_BYTES, dtype_of
from libra_cli.core.launch.sharding import RankConditions, dp_shard_size, is_sharded
from libra_cli.core.launch.shares import rank_gpu_gib, server_room_gib
from libra_cli.core.launch.trainer_backend import ranks_per_node
from libra_cli.core.types import Plan, Slot

USUAL_GIB = (24, 40, 48, 80, 94, 141, 180, 268)
"""Memory of GPUs that people have: RTX 4090, A100, A6000 and L40S, H100, H100 NVL, H200, B200, and
B300, which is sold as 288 GB."""
CONTEXT_GIB = (24, 48, 80, 141)
"""The sizes of ``USUAL_GIB`` for which the table tells how long contexts may be."""

RankKind = Literal["trainer", "worker"]
NO_FIT = "DOES NOT FIT"
"""The words of a line on a process that fits no GPU of ``USUAL_GIB``."""


class MemoryLine(NamedTuple):
    """What memory goes to, in a line for people."""

    text: str
    process: str = ""
    """The kind of process, as people are told; empty where a line is of none."""
    kind: RankKind | Literal["server", ""] = ""
    fits: bool = True
    """Whether it fits a GPU of ``USUAL_GIB``, or needs none."""


def memory_table(
    recipe: Recipe,
    plan: Plan,
    slots: tuple[Slot, ...],
    shape: Architecture,
    head: HeadSize | None,
) -> tuple[MemoryLine, ...]:
    """Lines for people: the trainer's ranks, the gradient workers', each bucket's servers; of
    these ``head`` is what drafts."""
    known = {slot.id: slot for slot in slots}
    train = [known[slot] for slot in plan.train]
    lines = _trainer(recipe, shape, train)
    workers = {known[slot].num_devices: known[slot] for slot in plan.gradient}
    lines += [_worker(recipe, shape, slot) for slot in workers.values()]
    buckets = {bucket.name: known[slot] for slot, bucket in plan.servers}
    lines += [_server(recipe, shape, slot, name, head) for name, slot in buckets.items()]
    return (*lines, MemoryLine(_transfers(recipe, shape, train)))


def unfit(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Return those of a table's lines whose processes fit no GPU. Where the trainer's ranks may
    share a replica in two ways, it is enough that one of them fits."""
    trainer = any(line.fits for line in lines if line.kind == "trainer")
    return [line for line in lines if not (line.fits or (trainer and line.kind == "trainer"))]


def _transfers(recipe: Recipe, shape: Architecture, train: list[Slot]) -> str:
    """Return the sizes of whole versions, gradients and
    checkpoints as a line; a delta is smaller.
    """
    version = NUMBER_BYTES[dtype_of(recipe.model, train)] * shape.trained
    sent = NUMBER_BYTES[recipe.training.worker_gradients] * shape.trained
    checkpoint = CHECKPOINT_BYTES * shape.trained
    seconds = ", ".join(f"{8 * version / speed / 1e9:.2g} s at {speed} Gb/s" for speed in (10, 100))
    return (
        f"a version {version / 1e9:.2f} GB, to a host {seconds}; gradients of a worker "
        f"{sent / 1e9:.2f} GB; a checkpoint {checkpoint / 1e9:.2f} GB"
    )


def _trainer(recipe: Recipe, shape: Architecture, train: list[Slot]) -> list[MemoryLine]:
    """A line on its ranks; two where it depends on the hosts' GPUs who shares what."""
    sizes, world = shard_sizes(recipe, train), sum(slot.num_devices for slot in train)
    if len(sizes) == 1:
        line = _rank(recipe, shape, train, "trainer", "trainer", sizes[0])
        return [line, *_longest(recipe, shape, train, sizes[0])]
    names = [
        f"trainer, {world // shards} replicas of {shards} ranks"
        if shards < world
        else "trainer, or else all ranks share one replica"
        for shards in sizes
    ]
    lines = [
        _rank(recipe, shape, train, "trainer", name, shards)
        for name, shards in zip(names, sizes, strict=True)
    ]
    return [*lines, *_longest(recipe, shape, train, sizes[-1])]


def _longest(
    recipe: Recipe, shape: Architecture, train: list[Slot], shards: int
) -> Iterator[MemoryLine]:
    """A line on the longest trajectories that GPUs have the memory for, by how many ranks share
    each forward pass; none without GPUs."""
    if not train[0].gpus:
        return
    conditions = _conditions(recipe, train)
    least = _tightest(recipe.node(slot.node) for slot in train)
    told = []
    for sharing in conditions.degrees(shape, _ranks(train, shards)):
        longest = {
            size: conditions.longest(shape, shards, sharing, rank_gpu_gib(least, size))
            for size in CONTEXT_GIB
        }
        held = ", ".join(f"{size} GB {tokens:,}" for size, tokens in longest.items() if tokens)
        told.append(f"{sharing}: {held or 'none'}")
    longest_text = "the longest trajectory that the trainer can learn from, by training.cp_size: "
    yield MemoryLine(longest_text + "; ".join(told))


def _tightest(nodes: Iterable[NodeSpec]) -> NodeSpec:
    """Return the node on which a rank has the least of a GPU."""
    return min(nodes, key=lambda node: rank_gpu_gib(node, 1.0))


def shard_sizes(recipe: Recipe, train: list[Slot]) -> list[int]:
    """Return how many ranks may share a replica, fewest first; two
    where it depends on the hosts' GPUs.
    """
    if not is_sharded(recipe.training, on_gpu=bool(train[0].gpus)):
        return [1]
    ranks = ranks_per_node(train)
    return sorted({dp_shard_size(recipe.training, ranks, host_fits=fit) for fit in (True, False)})


def _worker(recipe: Recipe, shape: Architecture, slot: Slot) -> MemoryLine:
    sharded = is_sharded(recipe.training, on_gpu=bool(slot.gpus))
    shards = slot.num_devices if sharded else 1
    return _rank(recipe, shape, [slot], "worker", "gradient worker", shards)


class RankGib(NamedTuple):
    """GiB of a rank of the trainer at its peak."""

    gpu: float
    """GiB of its GPU, with what CUDA and NCCL take."""
    locked: float
    """GiB of its host's memory that it locks for activations."""


def rank_gib(
    recipe: Recipe, shape: Architecture, slots: list[Slot], shards: int, gpu_gib: float
) -> RankGib:
    """What each rank on these slots takes, where GPUs have this size."""
    conditions = _conditions(recipe, slots)
    sharing = conditions.sharing(shape, shards, _ranks(slots, shards), gpu_gib)
    conditions = conditions.settled(shape, shards, sharing, gpu_gib)
    return RankGib(
        conditions.rank_gib(shape, shards, sharing), conditions.pinned_gib(shape, shards, sharing)
    )


def _conditions(recipe: Recipe, slots: list[Slot]) -> RankConditions:
    return RankConditions.of(
        recipe,
        on_gpu=bool(slots[0].gpus),
        dtype=dtype_of(recipe.model, slots),
        ranks=sum(slot.num_devices for slot in slots),
    )


def _ranks(slots: list[Slot], shards: int) -> int:
    """The ranks of which neighbours may share a forward pass: of a replica, or all."""
    return shards if shards > 1 else sum(slot.num_devices for slot in slots)


def _parts(
    conditions: RankConditions, shape: Architecture, shards: int, sharing: int, kind: RankKind
) -> dict[str, float]:
    if kind != "worker":
        return dict(conditions.use(shape, shards, sharing).parts)
    without = replace(conditions, optimizer=NO_MOMENTS).use(shape, shards, sharing)
    return {what: size for what, size in without.parts.items() if what != "update"}


def _rank(
    recipe: Recipe,
    shape: Architecture,
    slots: list[Slot],
    kind: RankKind,
    process: str,
    shards: int,
) -> MemoryLine:
    name = process
    world = sum(slot.num_devices for slot in slots)
    on_gpu = bool(slots[0].gpus)
    conditions = _conditions(recipe, slots)
    sharing = conditions.sharing(shape, shards, _ranks(slots, shards))
    parts = _parts(conditions, shape, shards, sharing, kind)
    if kind != "worker" and conditions.optimizer == "adamw_offload":
        name = f"{name} (and {8 * shape.trained / shards / GIB:.1f} GiB in the host's memory)"
    if pinned := conditions.pinned_gib(shape, shards, sharing):
        most = max(slot.num_devices for slot in slots)
        name = (
            f"{name} (and {pinned:.1f} GiB of activations locked in its host's memory, "
            f"{most * pinned:.1f} GiB of a slot of {most})"
        )
    if (parted := conditions.parted(shape, shards)) > 1:
        name = f"{name} (each with 1/{parted} of the experts)"
    told = ", ".join(f"{what} {size / GIB:.1f}" for what, size in parts.items() if size > 0)
    held = sum(parts.values()) / GIB
    whose = f"that {sharing} ranks share, each with" if sharing > 1 else "of"
    line = (
        f"{name}, each of {world} rank{'s' * (world > 1)}, micro-batches {whose} "
        f"{-(-conditions.row(shape) // sharing):,} tokens: {held:.1f} GiB = {told}"
    )
    if not on_gpu:
        return MemoryLine(line, process, kind)
    wanted = held + conditions.overhead_gib
    node = _tightest(recipe.node(slot.node) for slot in slots)
    fits = _fits(wanted, node, _keeping(conditions, shape, shards, sharing, node))
    return MemoryLine(f"{line}; {fits}", process, kind, fits=not fits.startswith(NO_FIT))


def _keeping(
    conditions: RankConditions, shape: Architecture, shards: int, sharing: int, node: NodeSpec
) -> int | None:
    """The smallest GPUs on which ``training.activation_checkpointing: auto`` keeps more, if any."""
    for size in USUAL_GIB:
        room = rank_gpu_gib(node, size)
        if conditions.settled(shape, shards, sharing, room) != conditions:
            return size
    return None


def _fits(wanted: float, node: NodeSpec, keeping: int | None) -> str:
    """Return on which GPUs so many GiB fit, with what CUDA and NCCL take included, and on which
    larger ones a rank that keeps more."""
    rooms = {size: USABLE_SHARE * rank_gpu_gib(node, size) for size in USUAL_GIB}
    part = "" if node.share is None else f"{node.share.train:g} of "
    size = next((size for size, room in rooms.items() if wanted <= room), None)
    if size is None:
        return f"{NO_FIT} {part}a GPU of {USUAL_GIB[-1]} GB"
    fits = f"fits {part}GPUs of {size} GB or more"
    if keeping is None:
        return fits
    larger = "also" if keeping == size else f"and {keeping} GB or more"
    return f"{fits}, {larger} with activation_checkpointing: selective (auto)"


def _server(
    recipe: Recipe, shape: Architecture, slot: Slot, name: str, head: HeadSize | None
) -> MemoryLine:
    on_gpu, max_len = bool(slot.gpus), recipe.model.max_len
    width = NUMBER_BYTES[dtype_of(recipe.model, [slot])]
    degree = slot.num_devices
    quantization = recipe.rollout.quantization
    weights = served_bytes(shape, quantization, width) / degree / GIB
    context = shape.kv_bytes(width) * max_len / GIB
    drafts = ""
    if head is not None:
        context += head.kv_bytes(width) * max_len / GIB
        drafts = f", of the head that drafts {head.bytes(width) / degree / GIB:.2f} GiB"
    process = f"server {name}"
    line = (
        f"{process}, each of {degree} device{'s' * (degree > 1)}: weights {weights:.1f} GiB"
        f"{f' in {quantization}' if quantization else ''}{drafts}; "
        f"a context of {max_len:,} tokens {context:.2f} GiB"
        f"{_fp32_head(recipe.model, shape, slot)}"
    )
    node = recipe.node(slot.node)
    if node.share is not None and not on_gpu:
        kv = f"; its KV cache is what {node.share.rollout:g} of the memory leaves"
        return MemoryLine(f"{line}{kv}", process, "server")
    if not on_gpu:
        contexts = _contexts(recipe.rollout.kv_gib / context)
        kv = f", so rollout.kv_gib {recipe.rollout.kv_gib} holds {contexts}"
        return MemoryLine(f"{line}{kv}", process, "server")
    rooms = {
        size: server_contexts(
            shape,
            tensor_parallel=degree,
            room=server_room_gib(node, recipe.rollout.gpu_memory, degree, size) * GIB,
            max_len=max_len,
            quantization=quantization,
            head=head,
        )
        for size in (*CONTEXT_GIB, USUAL_GIB[-1])
    }
    holding = [size for size, contexts in rooms.items() if contexts >= 1]
    told = [size for size in holding if size in CONTEXT_GIB] or holding
    held = ", ".join(f"{size} GB {_contexts(rooms[size])}" for size in told)
    on = "GPUs of" if node.share is None else f"{node.share.rollout:g} of GPUs of"
    told_fit = f"on {on} {held}" if held else f"{NO_FIT} {on} {USUAL_GIB[-1]} GB"
    return MemoryLine(f"{line}; {told_fit}", process, "server", fits=bool(held))


def _fp32_head(model: ModelSpec, shape: Architecture, slot: Slot) -> str:
    """Return what logits in float32 take of a server: a GPU sums up products of bfloat16 in
    float32, vLLM on a CPU casts its part of the output layer in every step."""
    if not model.fp32_lm_head or dtype_of(model, [slot]) == "float32":
        return ""
    if slot.gpus:
        return "; logits in float32, of weights as they are"
    copied = 4 * shape.vocabulary * shape.hidden / slot.num_devices / GIB
    return f"; logits in float32, of a copy of the output layer in each step {copied:.2f} GiB"


def _contexts(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"
