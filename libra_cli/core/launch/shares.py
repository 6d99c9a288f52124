"""What a process may have of a memory: all that is usual, or its share (``nodes[].share``).

A server and a rank that share a GPU start in any order and at the same time, so none of them may
take the memory that it finds free. vLLM 0.32 would: it counts as its own whatever anybody takes
between its start and its first batch, and ends if something is given back meanwhile
(``vllm/v1/worker/gpu_worker.py``, ``determine_available_memory``). So the bytes of its KV cache are
told to it: what its share leaves beside the weights, by the law of ``costs.memory``. Where that is
not known, of a model whose sizes are not and of one with a head that drafts or a tower that sees,
vLLM measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from libra_cli.config.recipe import ModelSpec, NodeSpec, ShareSpec
from libra_cli.config.rollout import RolloutSpec
from libra_cli.core.costs.memory import (
    CPU_SERVER_GIB,
    GIB,
    SMALL_GPU_GIB,
    SMALL_USABLE_SHARE,
    USABLE_SHARE,
    served_bytes,
    server_overhead_gib,
)
from libra_cli.core.launch.process import NUMBER_BYTES, dtype_of
from libra_cli.core.launch.rollout_backend import ServerLaunch
from libra_cli.core.types import Pool, Slot, SlotId


def server_share(node: NodeSpec, gpu_memory: float | None, gpu_gib: float) -> float:
    """Return the share of each of its GPUs that a server takes on a node with GPUs of this size;
    ``gpu_memory`` is ``rollout.gpu_memory``."""
    if node.share is not None:
        return node.share.rollout
    usual = SMALL_USABLE_SHARE if 0 < gpu_gib < SMALL_GPU_GIB else USABLE_SHARE
    return gpu_memory or usual


def server_room_gib(node: NodeSpec, gpu_memory: float | None, degree: int, gpu_gib: float) -> float:
    """Return GiB of each of a server's GPUs for weights and KV cache."""
    return gpu_gib * server_share(node, gpu_memory, gpu_gib) - server_overhead_gib(degree)


def serving_when_idle(
    nodes: Sequence[NodeSpec], slots: Iterable[Slot]
) -> Mapping[SlotId, ShareSpec]:
    """Return the slots whose servers take requests only while the trainer on their GPUs waits, with
    their shares of these GPUs."""
    shared = {node.name: node.share for node in nodes if node.share is not None}
    serving = [slot for slot in slots if slot.pool is Pool.ROLLOUT and slot.node in shared]
    found = ((slot.id, shared[slot.node]) for slot in serving)
    return {slot: share for slot, share in found if share.serve == "when-idle"}


def rank_gpu_gib(node: NodeSpec, gpu_gib: float) -> float:
    """Return the GiB of a GPU of its own on which a rank might take as much as on this one."""
    return gpu_gib if node.share is None else gpu_gib * node.share.train / USABLE_SHARE


def shared_cache_bytes(
    launch: ServerLaunch, node: NodeSpec, rollout: RolloutSpec, model: ModelSpec
) -> int:
    """Return the bytes of each GPU for the KV cache of a server on a node with shares; 0 where vLLM
    measures, or no memory is left for one."""
    slot, shape = launch.slot, launch.shape
    drafts = rollout.speculative is not None and rollout.speculative.has_head
    memory = launch.facts.gpu_gib if slot.gpus else launch.facts.memory_gib
    if node.share is None or shape is None or not memory or drafts or model.images:
        return 0
    taken = server_overhead_gib(slot.num_devices) if slot.gpus else CPU_SERVER_GIB
    weights = served_bytes(shape, rollout.quantization, NUMBER_BYTES[dtype_of(model, [slot])])
    return max(0, int((node.share.rollout * memory - taken) * GIB - weights / slot.num_devices))
