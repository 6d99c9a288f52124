"""Whether a host has the cores that its slots own (``nodes[].cores``)."""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.core.launch.cores import owned_cores
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, Finding, Remedy

CHECK = "cores"


def cores(case: PreflightCase) -> Iterator[Finding]:
    """Check every node that says how many cores a slot of it owns."""
    owned = [(node, facts.cpus) for node, facts in case.looked() if node.cores]
    for node, cpus in owned:
        wanted, slots = owned_cores(node), node.num_slots
        if cpus < wanted:
            fitting = f"cores: {cpus // slots}" if cpus >= slots else f"slots: {cpus}"
            yield Finding(
                CHECK,
                node.name,
                "warns",
                f"{slots} slots own {wanted} cores together ({node.cores} each), it has {cpus}",
                "they overlap: each has its threads, but is slower while the others work",
                Remedy("recipe", f"nodes: {{host: {node.host}, {fitting}}}, or leave it so"),
            )
    if owned:
        yield Finding(CHECK, ALL, "fine", "every slot has cores of its own")
