"""``libra export``: a checkpoint of a run as a Hugging Face directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.errors import HostError, InputError, LibraError, StateError, WrongRun
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.launch.process import PeerAddress
from libra_cli.core.records import ExportRecord
from libra_cli.report.model_card import model_card
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.cluster import host_of
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.result_files import make_empty
from libra_cli.runtime.store.controller_process import controller_alive
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run, recipe_of
from libra_cli.runtime.trainer.checkpoints import (
    FoundCheckpoint,
    best_of,
    find_checkpoints,
    scored_by,
)
from libra_cli.runtime.trainer.model_export import ModelExports, fetch_model


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """What was asked for: a step, or the best, or neither, which is the last; and where to."""

    step: int | None = None
    best: bool = False
    to: Path | None = None
    merge: bool = False
    """An adapter into the model, or else it is written as it is."""


def card_of(run_dir: Path, step: int) -> Mapping[str, Any]:
    """The card of the model of a step, of what the database says now."""
    with Reader(run_dir) as reader:
        return model_card(reader, recipe_of(run_dir), step)


def export(run_dir: Path | None, order: ExportOrder, note: Callable[[str], None]) -> ExportRecord:
    """``libra export``: make the model on a host that trained it; with ``to``, copy it here.

    The run directory lists it afterwards, unless the run goes on or nothing can be written there,
    which is told.

    Raises:
        InputError: the order names a step and the best at once, or ``to`` is no place for it.
        WrongRun: no such run, or no such checkpoint; the message names those there are.
        LibraError: a host that is needed does not answer, or the model cannot be made.
    """
    if order.best and order.step is not None:
        raise InputError(
            "--best and --step each choose the checkpoint: one of them would be ignored",
            hint=f"libra export RUN_DIR --best, or libra export RUN_DIR --step {order.step}",
        )
    return asyncio.run(_export(run_dir or newest_run(), order, note))


async def _export(run_dir: Path, order: ExportOrder, note: Callable[[str], None]) -> ExportRecord:
    recipe = recipe_of(run_dir)
    if order.merge and recipe.training.lora is None:
        raise WrongRun(
            f"{run_dir} trained the whole model: there is no adapter to merge",
            hint="leave out --merge",
        )
    with Reader(run_dir) as reader:
        run_id, addresses = reader.run().id, _addresses(reader, recipe.nodes)
        evaluations = reader.evaluations()
    if order.to is not None:
        make_empty(order.to, hint=f"libra export {run_dir} --to my-model")
    hosts = await _reach(recipe, run_id, note)
    try:
        there = await find_checkpoints({node: host for node, (host, _) in hosts.items()})
        found = scored_by(there, evaluations, recipe.evaluation_names)
        chosen = _chosen(found, order, run_dir)
        if order.best and chosen.score is None:
            note(f"no checkpoint has a score: step {chosen.step}, the last, stands for the best")
        exports = ModelExports(
            hosts, addresses, lambda step: card_of(run_dir, step), RunSecrets.new()
        )
        made = await exports.make(chosen, merge=order.merge)
        await asyncio.to_thread(_list, run_dir, made, order.to, note)
        if order.to is not None:
            note(f"copying {made.bytes / 1e9:.2f} GB from {made.node}")
            await fetch_model(hosts[made.node][0], made.path, order.to)
        return made
    finally:
        await asyncio.gather(*(host.transport.close() for host, _ in hosts.values()))


def _list(run_dir: Path, made: ExportRecord, to: Path | None, note: Callable[[str], None]) -> None:
    """Write down in the run directory that a model was made; a note says why it cannot be."""
    try:
        with Reader(run_dir) as reader:
            if controller_alive(reader):
                raise StateError("its controller alone writes there while the run goes on")
        with Journal(run_dir) as journal:
            journal.save(made)
    except StateError as error:
        first = "" if to or Path(made.path).is_dir() else f"libra export {run_dir} --to DIR, then "
        place = "DIR" if first else to or made.path
        note(
            f"{run_dir} does not list this model: {error}; libra eval takes its directory: "
            f"{first}libra eval {place} RECIPE"
        )


def _addresses(reader: Reader, nodes: Sequence[NodeSpec]) -> dict[str, PeerAddress]:
    """Where the hosts reach each other, as was found when the run began."""
    own = {row.node: str(row.facts.get("address", row.node)) for row in reader.nodes()}
    return {
        node.name: PeerAddress.of(
            node.address or own.get(node.name, node.name),
            node.data_address or "",
            own.get(node.name, ""),
        )
        for node in nodes
    }


async def _reach(
    recipe: Recipe, run_id: str, note: Callable[[str], None]
) -> dict[str, tuple[Host, NodeSpec]]:
    """Connect to the hosts of a run; those that cannot be reached are told and left out.

    Raises:
        HostError: none can.
    """
    hosts = {node.name: (host_of(node), node) for node in recipe.nodes}
    results = await asyncio.gather(
        *(host.prepare(run_id) for host, _ in hosts.values()), return_exceptions=True
    )
    for node, result in zip(list(hosts), results, strict=True):
        if isinstance(result, LibraError):
            note(f"without {node}: {result}")
            await hosts.pop(node)[0].transport.close()
        elif isinstance(result, BaseException):
            raise result
    if not hosts:
        hints = dict.fromkeys(one.hint for one in results if isinstance(one, LibraError))
        raise HostError("no host of the run can be reached", hint="; ".join(filter(None, hints)))
    return hosts


def _chosen(found: list[FoundCheckpoint], order: ExportOrder, run_dir: Path) -> FoundCheckpoint:
    if not found:
        raise WrongRun(
            f"no host has a checkpoint of {run_dir}",
            hint="checkpoints are in workdir of the hosts that train: is it still there?",
        )
    if order.best:
        return best_of(found) or found[-1]
    of_step = [one for one in found if order.step in (None, one.step)]
    if not of_step:
        steps = ", ".join(str(one.step) for one in found)
        raise WrongRun(
            f"there is no checkpoint of step {order.step}: there are {steps}",
            hint=f"libra export {run_dir} --step {found[-1].step}",
        )
    return of_step[-1]
