"""Asks one host for everything that the checks of every run look at (``core.preflight.checks``)."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from dataclasses import replace

from libra_cli.config.errors import HostError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.preflight.case import all_packages
from libra_cli.core.preflight.host_report import HostReport
from libra_cli.runtime.hosts.host import Host


async def look(host: Host, recipe: Recipe, node: NodeSpec) -> HostReport:
    """What an open host tells of itself, and of the model if it has it."""
    path, speculative = recipe.model.path, recipe.rollout.speculative
    head = speculative.model if speculative is not None else None
    others = () if node.only_plays else recipe.slot_nodes  # who plays talks to the controller only
    peers = [other.reach for other in others if other.name != node.name]
    frozen = [one.model.path for one in frozen_slots(recipe.models, recipe.nodes)]
    asked_at = time.time()
    facts = await host.facts(
        peers,
        packages=all_packages(recipe),
        paths=[one for one in (path, head, *frozen) if one is not None],
        devices=node.gpu_ids,
        sandbox=node.name in recipe.sandbox_nodes,
    )
    report = HostReport(facts=facts, asked_at=asked_at, answered_at=time.time())
    if head is not None and head in facts.paths:
        with suppress(HostError):  # as below
            report = replace(report, head=await host.model_files(head))
    if path is None or path not in facts.paths:
        return report
    try:
        return replace(report, model=await host.model_files(path))
    except HostError:  # no directory, or nobody may read it: as if it were not there
        paths = tuple(one for one in facts.paths if one != path)
        return replace(report, facts=replace(facts, paths=paths))


def open_files() -> int | None:
    """How many files the controller may have open, from now on as many as the system allows.

    None without a limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return None if hard == resource.RLIM_INFINITY else hard
