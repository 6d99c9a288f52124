"""Rules for what is between hosts: interfaces, names, bandwidth, collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra_cli.config.recipe import NodeSpec
from libra_cli.core.launch.process import interface_env
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.core.preflight.host_report import NetworkInterface, NodeFacts

SLOW_SHARE = 0.3
"""Share of an interface's speed below which a transfer counts as slow: less points at another
interface, or at others who use it.
"""


def network(case: PreflightCase) -> Iterator[Finding]:
    """Check that hosts know each other's addresses, and that
    the interface for collectives is up.
    """
    if len(case.recipe.slot_nodes) < 2:
        yield Finding("network", ALL, "fine", "one host needs none")
        return
    chosen = []
    for node, facts in case.looked():
        yield from _routes(node, facts)
        yield from _address(node, facts)
        yield from _interface(node, facts)
        yield from _named(case, node, facts)
        chosen.append(f"{facts.interface}")
    yield Finding("network", ALL, "fine", f"over {' or '.join(dict.fromkeys(chosen))}")


def _address_in_recipe(node: NodeSpec) -> Remedy:
    return _in_recipe(node.host, "address: the address of its fast network")


def _in_recipe(host: str, change: str) -> Remedy:
    return Remedy("recipe", f"nodes: {{host: {host}, {change}}}")


def _routes(node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    for route in facts.routes:
        if route.error:
            yield Finding(
                "network",
                node.name,
                "stops",
                route.error,
                "hosts fetch weights from each other and meet for collectives",
                _in_recipe(route.peer, "address: one that others can reach"),
            )


def _address(node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    own = {address for one in facts.interfaces for address in one.addresses}
    for key, address in ("address", node.address), ("data_address", node.data_address):
        if address and own and address[0].isdigit() and address not in own:
            yield Finding(
                "network",
                node.name,
                "stops",
                f"the recipe's {key} {address} is on none of its interfaces",
                "others are told to reach it there",
                _in_recipe(node.host, f"{key}: the address of its fast network"),
            )


def _interface(node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    """The interface that libra chooses, or that the node's ``env`` names instead."""
    for variable, chosen in {**interface_env(facts.interface), **node.env}.items():
        if not variable.endswith("_SOCKET_IFNAME"):
            continue
        matching = matching_interfaces(chosen, facts.interfaces)
        told = ", ".join(one.name for one in facts.interfaces if one.up and one.name != "lo")
        if not matching:
            reason = f"{variable} is {chosen!r}, and it has no such interface (up: {told})"
        elif not any(one.up for one in matching):
            reason = f"{variable} is {chosen!r}, which is down (up: {told})"
        elif not any(facts.address in one.addresses for one in matching):
            reason = f"{variable} is {chosen!r}, but {facts.address} is not on it (up: {told})"
        else:
            continue
        yield Finding(
            "network",
            node.name,
            "stops",
            reason,
            "collectives would hang until their time is over",
            _in_recipe(node.host, f"env: {{{variable}: {facts.interface}}}"),
        )


def matching_interfaces(
    wanted: str, interfaces: Sequence[NetworkInterface]
) -> list[NetworkInterface]:
    """Interfaces that a ``NCCL_SOCKET_IFNAME`` names: prefixes, ``=`` for whole names, ``^`` not.

    As NCCL reads it (its guide, environment variables). Gloo takes whole names only, which are
    their own prefixes.
    """
    negated, rest = wanted.startswith("^"), wanted.lstrip("^")
    exact, names = rest.startswith("="), rest.lstrip("=").split(",")

    def hit(name: str) -> bool:
        return any(name == one if exact else name.startswith(one) for one in names if one)

    return [one for one in interfaces if hit(one.name) != negated]


def _named(case: PreflightCase, node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    """Check that the address other hosts resolve this host's name to is one of its own."""
    own = {address for one in facts.interfaces for address in one.addresses}
    for other, told in case.looked():
        for route in told.routes:
            if route.peer != node.reach or route.error or other.name == node.name or not own:
                continue
            if route.target.startswith("127.") or route.target not in own:
                loopback = route.target.startswith("127.")
                yield Finding(
                    "network",
                    other.name,
                    "stops" if loopback else "warns",
                    f"it takes {node.reach} for {route.target}, which is "
                    + ("itself" if loopback else f"no address of {node.name}"),
                    "it would meet the wrong host" if loopback else "unless addresses are mapped",
                    _address_in_recipe(node),
                )


def bandwidth(case: PreflightCase) -> Iterator[Finding]:
    """Check that data reaches every host, fast enough for a version in time."""
    size = _version_bytes(case)
    for one in case.transfers:
        if one.error:
            first, last = case.recipe.node(one.source).port_range
            yield Finding(
                "bandwidth",
                one.target,
                "stops",
                f"nothing comes through from {one.source}: {one.error}",
                "weights, gradients and collectives go from host to host directly",
                Remedy("person", f"open TCP ports {first}-{last} between the hosts"),
            )
            continue
        seconds = 8 * size / 1e9 / one.gbit_s if one.gbit_s else 0.0
        if seconds > case.recipe.weight_sync.timeout_s:
            yield Finding(
                "bandwidth",
                one.target,
                "warns",
                f"{one.gbit_s:.2f} Gb/s from {one.source}: a version takes {seconds:.0f} s",
                f"weight_sync.timeout_s is {case.recipe.weight_sync.timeout_s:.0f}",
                Remedy("recipe", f"weight_sync: {{timeout_s: {2 * seconds:.0f}}}"),
            )
        elif 0 < one.gbit_s * 1e3 < SLOW_SHARE * _promised(case, one.target):
            promised = _promised(case, one.target) / 1e3
            yield Finding(
                "bandwidth",
                one.target,
                "warns",
                f"{one.gbit_s:.2f} Gb/s from {one.source} over a link of {promised:.0f} Gb/s",
                "another network may be in between, or others use it",
                _address_in_recipe(case.recipe.node(one.target)),
            )
    measured = [one for one in case.transfers if not one.error]
    if measured:
        slowest = min(measured, key=lambda one: one.gbit_s)
        told = f"{slowest.gbit_s:.2f} Gb/s at least ({slowest.source} to {slowest.target})"
        yield Finding("bandwidth", ALL, "fine", told)


def _promised(case: PreflightCase, name: str) -> int:
    facts = case.hosts[name].facts
    if facts is None:
        return 0
    return next((one.speed_mbit for one in facts.interfaces if one.name == facts.interface), 0)


def _version_bytes(case: PreflightCase) -> int:
    needs = [case.needs(node).versions for node, _ in case.looked()]
    return max(needs, default=0) // (case.recipe.weight_sync.keep_versions + 1)


def all_reduce(case: PreflightCase) -> Iterator[Finding]:
    """Check that two ranks on two hosts that train can sum up over the interface of the run."""
    for one in case.all_reduces:
        if one.error:
            yield Finding(
                "all-reduce",
                " + ".join(one.hosts),
                "stops",
                f"{one.backend} over {one.interface}: {one.error}",
                "a trainer over both would hang or fail the same way",
                _in_recipe(one.hosts[0], f"env: {{{_variable(one.backend)}: another interface}}"),
            )
    done = [one for one in case.all_reduces if not one.error]
    if done:
        worst = max(done, key=lambda one: one.seconds)
        told = f"{worst.backend} over {worst.interface}, {worst.bytes / 2**20:.0f} MiB in"
        yield Finding("all-reduce", ALL, "fine", f"{told} {worst.seconds:.3f} s at most")
    elif not case.all_reduces:
        yield Finding("all-reduce", ALL, "fine", "one host trains: nothing to try")


def _variable(backend: str) -> str:
    return f"{backend.upper()}_SOCKET_IFNAME"
