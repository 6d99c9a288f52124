"""For every kind of process of a plan: what its memory goes to, and on which GPUs it fits.

The numbers are those of ``core.costs.memory``. How much memory the GPUs have is not known before
the hosts are asked; without it each line tells the smallest usual size on which the process fits.
"""

from __future__ import annotations

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.memory import (
    SERVER_OVERHEAD_GIB,
    TRAINER_OVERHEAD_GIB,
    USABLE_SHARE,
    Architecture,
    Choice,
    rank_memory,
    server_contexts,
)
from libra_cli.core.costs.profile import GIB
from libra_cli.core.launch.process import dtype_of
from libra_cli.core.types import Plan, Slot

USUAL_GIB = (24, 40, 48, 80, 94, 141, 180)
"""Memory of GPUs that people have: RTX 4090, A100, A6000 and L40S, H100, H100 NVL, H200, B200."""


def memory_table(
    recipe: Recipe, plan: Plan, slots: tuple[Slot, ...], shape: Architecture
) -> tuple[str, ...]:
    """Lines for people: the trainer's ranks, the gradient workers', each bucket's servers."""
    known = {slot.id: slot for slot in slots}
    train = [known[slot] for slot in plan.train]
    lines = [_rank(recipe, shape, train, "trainer")]
    workers = {known[slot].num_devices: known[slot] for slot in plan.gradient}
    lines += [_rank(recipe, shape, [slot], "gradient worker") for slot in workers.values()]
    buckets = {bucket.name: known[slot] for slot, bucket in plan.servers}
    lines += [_server(recipe, shape, slot, name) for name, slot in buckets.items()]
    return tuple(lines)


def _rank(recipe: Recipe, shape: Architecture, slots: list[Slot], name: str) -> str:
    world = sum(slot.num_devices for slot in slots)
    on_gpu, training = bool(slots[0].gpus), recipe.training
    tokens = max(training.micro_batch_tokens, recipe.model.max_len)
    sharded = training.sharding == "fsdp2" or (training.sharding == "auto" and on_gpu)
    use = rank_memory(
        shape,
        world=world if sharded else 1,
        tokens=tokens,
        choice=_choice(training.activation_checkpointing, on_gpu=on_gpu),
        width=2 if dtype_of(recipe.model, slots) == "bfloat16" else 4,
    )
    parts = dict(use.parts)
    if name != "trainer":  # it has no optimizer
        parts = {what: size for what, size in parts.items() if what not in ("moments", "update")}
    told = ", ".join(f"{what} {size / GIB:.1f}" for what, size in parts.items() if size > 0)
    held = sum(parts.values()) / GIB
    line = (
        f"{name}, each of {world} rank{'s' * (world > 1)}, micro-batches of {tokens:,} tokens: "
        f"{held:.1f} GiB = {told}"
    )
    return f"{line}; {_fits(held + TRAINER_OVERHEAD_GIB)}" if on_gpu else line


def _choice(given: str, *, on_gpu: bool) -> Choice:
    match given:
        case "none" | "selective" | "full":
            return given
        case _:
            return "full" if on_gpu else "none"


def _fits(wanted: float) -> str:
    """On which GPUs so many GiB fit, what CUDA and NCCL take being among them."""
    size = next((size for size in USUAL_GIB if wanted <= USABLE_SHARE * size), None)
    if size is not None:
        return f"fits GPUs of {size} GB or more"
    return (
        f"DOES NOT FIT a GPU of {USUAL_GIB[-1]} GB: train on more GPUs, lower "
        "training.micro_batch_tokens, or set training.activation_checkpointing: full"
    )


def _server(recipe: Recipe, shape: Architecture, slot: Slot, name: str) -> str:
    on_gpu, max_len = bool(slot.gpus), recipe.model.max_len
    width = 2 if dtype_of(recipe.model, [slot]) == "bfloat16" else 4
    degree = slot.num_devices
    weights = width * shape.parameters / degree / GIB
    context = shape.kv_bytes(width) * max_len / GIB
    line = (
        f"server {name}, each of {degree} device{'s' * (degree > 1)}: weights {weights:.1f} GiB; "
        f"a context of {max_len:,} tokens {context:.2f} GiB"
    )
    if not on_gpu:
        return f"{line}, so rollout.kv_gib {recipe.rollout.kv_gib} holds " + _contexts(
            recipe.rollout.kv_gib / context
        )
    rooms = {
        size: server_contexts(
            shape,
            tensor_parallel=degree,
            room=(size * recipe.rollout.gpu_memory - SERVER_OVERHEAD_GIB) * GIB,
            max_len=max_len,
        )
        for size in (24, 48, 80, 141)
    }
    held = ", ".join(f"{size} GB {_contexts(n)}" for size, n in rooms.items() if n >= 1)
    return f"{line}; on GPUs of {held}" if held else f"{line}; DOES NOT FIT GPUs of 141 GB"


def _contexts(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"
