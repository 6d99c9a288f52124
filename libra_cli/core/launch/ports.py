"""Which of a run's processes listen on which node."""

from __future__ import annotations

from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import slots_of
from libra_cli.core.launch.process import server_port, worker_of
from libra_cli.core.types import Plan, Pool, node_of


def ports_needed(recipe: Recipe, plan: Plan) -> dict[str, tuple[str, ...]]:
    """What listens on each node: one name a port, in the order the ports should be handed out.

    ``server-<slot index>`` for a slot that serves or may; ``gradient-<slot index>`` (HTTP),
    ``side-`` (its side channel) and ``rendezvous-`` for one that may be a gradient worker; on the
    first train node ``trainer`` (HTTP) and ``rendezvous`` (where the ranks meet); ``weights`` where
    the agent serves versions to peers.
    """
    names: dict[str, list[str]] = {node.name: [] for node in recipe.nodes}
    serving = dict(plan.servers)
    for slot in slots_of(recipe):
        hybrid = slot.pool is Pool.HYBRID
        if slot.id in serving or hybrid:
            names[slot.node].append(server_port(slot))
        if hybrid:
            worker = worker_of(slot.id)
            names[slot.node] += [worker, f"side-{worker}", f"rendezvous-{worker}"]
    names[node_of(plan.train[0])] += ["trainer", "rendezvous"]
    if len(recipe.nodes) > 1:
        for entries in names.values():
            entries.append("weights")
    return {node: tuple(entries) for node, entries in names.items() if entries}
