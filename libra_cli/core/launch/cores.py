"""The cores of a slot's processes: how many threads each has, and which cores they stay on.

On a host without GPUs slots share the cores evenly, as numbers of threads and not as fixed sets.
With ``nodes[].cores`` each owns as many as that says, whatever the host has. Where it has enough
for all of its slots, their processes stay on cores of their own: they are told their places among
those that the host's agent may use, since only it knows which (``node.processes.cores``). Where it
has fewer, slots overlap, and nothing but their threads is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.recipe import NodeSpec
from libra_cli.core.types import Slot

PLACES = "LIBRA_CORES"
"""The variable that says at which places the cores of a process are, from 0 on: ``2,3``."""


def owned_cores(node: NodeSpec) -> int:
    """Return the cores that the slots of a node own together; 0 where they share what there is."""
    return (node.cores or 0) * node.num_slots


def cores_env(
    node: NodeSpec, slots: Sequence[Slot], cpus: int | None, *, processes: int
) -> dict[str, str]:
    """Return the environment of one of ``processes`` equal processes on ``slots``.

    ``cpus`` are the cores of the host; None where nobody has looked.
    """
    if node.cores is None:
        return {"OMP_NUM_THREADS": _even_threads(node, slots, cpus, processes)}
    parts = [part for slot in slots for part in slot.parts]
    threads = {"OMP_NUM_THREADS": str(max(1, node.cores * len(parts) // processes))}
    places = ",".join(str(part * node.cores + core) for part in parts for core in range(node.cores))
    if cpus is None:
        return threads | {PLACES: f"<{places}, if it has {owned_cores(node)} cores>"}
    return threads | ({PLACES: places} if cpus >= owned_cores(node) else {})


def _even_threads(node: NodeSpec, slots: Sequence[Slot], cpus: int | None, processes: int) -> str:
    mine, parts = sum(len(slot.parts) for slot in slots), node.num_slots * processes
    if node.is_open:  # no slot is a share of it, but its GPUs are
        mine, parts = sum(len(slot.gpus) for slot in slots), node.gpus * processes
    if cpus is not None:
        return str(max(1, cpus * mine // parts))
    return "<cores>" if mine == parts else f"<cores * {mine} / {parts}>"
