"""``libra ps`` and ``libra gc``: what runs own on hosts, and what of it is old."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_cli.config.errors import HostError, LibraError, RecipeError
from libra_cli.config.recipe import NodeSpec
from libra_cli.config.text import one_line
from libra_cli.runtime.hosts.cluster import host_of
from libra_cli.runtime.hosts.upload import last_line
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of

ANSWER_S = {"ps": 120.0, "gc": 3600.0}
"""Seconds for an answer; a disk may take long to remove a few terabytes of checkpoints."""
NO_RUN = "none"
"""Stands for a run where only the host is asked; nothing is made there for it."""


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """What one host answered, or why it did not."""

    node: str
    told: Any = None
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """The nodes to ask, and the run that is meant, if one is."""

    nodes: tuple[NodeSpec, ...]
    run: str = field(default="")


def targets(target: Path | None, hosts: Sequence[str]) -> Targets:
    """Return the hosts of a recipe or of a run directory, and those that are named.

    Raises:
        RecipeError: neither is given, or the recipe is wrong.
        StateError: no such run.
    """
    nodes = [NodeSpec(host=host) for host in hosts]
    if target is None and not nodes:
        raise RecipeError(
            "whose hosts? name a recipe, a run directory, or --host HOST",
            hint="libra ps RECIPE, or libra gc RECIPE --dry-run",
        )
    if target is not None and target.is_dir():
        with Reader(target) as reader:  # the directory may have been given another name
            run_id = reader.run().id
        return Targets((*recipe_of(target).nodes, *nodes), run_id)
    if target is not None:
        nodes = [*load_recipe(target, plays=False).nodes, *nodes]
    return Targets(tuple(nodes))


def owned(chosen: Targets) -> list[HostAnswer]:
    """``libra ps``: what any run of this user owns on each host, and who else holds its GPUs."""
    return asyncio.run(_ask(chosen.nodes, "ps", []))


def collect_old(
    chosen: Targets, *, days: float, everything: bool, dry_run: bool
) -> list[HostAnswer]:
    """``libra gc``: what was removed on each host, or would be."""
    flags = [*(["--all"] if everything else []), *(["--dry-run"] if dry_run else [])]
    return asyncio.run(_ask(chosen.nodes, "gc", [str(days), chosen.run, *flags]))


async def _ask(
    nodes: Sequence[NodeSpec], command: str, arguments: Sequence[str]
) -> list[HostAnswer]:
    return await asyncio.gather(*(_ask_one(node, command, arguments) for node in nodes))


async def _ask_one(node: NodeSpec, command: str, arguments: Sequence[str]) -> HostAnswer:
    host = host_of(node)
    try:
        await host.prepare(NO_RUN)
        argv = [*host.module_argv("libra_cli.node.inventory.main"), command, host.workdir]
        done = await host.transport.run([*argv, *arguments], timeout_s=ANSWER_S[command])
        if done.exit_code:
            raise HostError(f"{node.name}: {done.last_words}")
        return HostAnswer(node.name, last_line(node.name, done))
    except LibraError as error:
        told = one_line(str(error)).removeprefix(f"{node.name}: ")
        return HostAnswer(node.name, error=told, hint=error.hint)
    finally:
        await host.close()
