"""The ports that a run's processes listen on, by node."""

from __future__ import annotations

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import worker_ports
from libra_cli.core.types import Plan, Pool, Slot, node_of


def ports_needed(recipe: Recipe, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the names of the ports on each node, one a port, in the order they should be handed
    out.

    ``side-gradient-<place>`` (its side channel) and ``rendezvous-`` for a slot that may be a
    gradient worker, where a place is the slot's index, or on open nodes its first GPU, of which no
    two slots in use share one; on the first train node ``rendezvous``, where the ranks meet;
    ``weights`` where the agent serves versions to peers. The controller needs none: the processes
    that it talks to listen on Unix sockets.
    """
    names: dict[str, list[str]] = {node.name: [] for node in recipe.slot_nodes}
    for slot in _places(recipe):
        if slot.pool is Pool.HYBRID:
            names[slot.node] += worker_ports(slot)
    names[node_of(plan.train[0])].append("rendezvous")
    if len(recipe.slot_nodes) > 1:
        for entries in names.values():
            entries.append("weights")
    return {node: tuple(entries) for node, entries in names.items() if entries}


def _places(recipe: Recipe) -> tuple[Slot, ...]:
    """Return the slots that processes may be on, or for open nodes one for each GPU."""
    if not recipe.has_open_nodes:
        return slots_of(recipe)
    return tuple(
        Slot(f"{node.name}/{gpu}x1", node.name, (gpu,), Pool.HYBRID)
        for node in recipe.nodes
        for gpu in range(node.gpus)
    )
