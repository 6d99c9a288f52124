"""Rules for the interface over which the recipe lets weight versions go unencrypted."""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.core.preflight.host_report import NodeFacts


def fabric(case: PreflightCase) -> Iterator[Finding]:
    """Check that all hosts have the trusted interface, and that they reach one another on it."""
    name = case.recipe.weight_sync.trusted_interface
    if name is None:
        yield Finding("fabric", ALL, "fine", "no interface is trusted: versions go over TLS")
        return
    for node, facts in case.looked():
        if reason := _reason(name, facts):
            up = ", ".join(one.name for one in facts.interfaces if one.up and one.name != "lo")
            yield Finding(
                "fabric",
                node.name,
                "stops",
                f"weight_sync.trusted_interface is {name!r}, {reason} (up: {up})",
                "versions would be pulled over TLS each time",
                Remedy("recipe", "weight_sync: {trusted_interface: one that all hosts have}"),
            )
    for host, error in case.fabric.errors.items() if case.fabric is not None else ():
        yield Finding(
            "fabric",
            host,
            "stops",
            f"no process group over {name}: {error}",
            "versions would be pulled over TLS each time",
            Remedy("person", f"let TCP through between the hosts on {name}, all ports"),
        )
    met = f", where hosts meet in {case.fabric.seconds:.3f} s" if case.fabric is not None else ""
    yield Finding("fabric", ALL, "fine", f"versions go by gloo over {name}, not encrypted{met}")


def _reason(name: str, facts: NodeFacts) -> str:
    """Why versions cannot go over the interface; empty if they can."""
    found = next((one for one in facts.interfaces if one.name == name), None)
    if found is None:
        return "and it has no such interface"
    if not found.up:
        return "which is down"
    return "" if found.addresses else "which has no address"
