"""``libra run``: a recipe from its first host to its report, and one that was stopped again."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from libra_cli.app.costs import live_planner
from libra_cli.app.first_plan import explained_first_plan, first_plan
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.memory import PUBLISHED, Architecture
from libra_cli.core.launch.dry_run import HostPlan, dry_run
from libra_cli.core.launch.memory_table import memory_table
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.types import Plan, Slot
from libra_cli.report.html.run_report import write_report
from libra_cli.report.status.run_state import LIVE
from libra_cli.runtime.episodes.player import EnvironmentFactory
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.session import LastCheckpoint, Session
from libra_cli.runtime.store.controller_process import controller_alive, process_started
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import records_in_order
from libra_cli.runtime.store.run_directory import RECIPE, keep_recipe, recipe_of


@dataclass(frozen=True, slots=True)
class DryRun:
    """What ``libra run --dry-run`` tells."""

    plan: Plan
    hosts: tuple[HostPlan, ...]
    memory: tuple[str, ...]
    """What the memory of each kind of process goes to, in lines."""


def plan_of(recipe_path: Path) -> tuple[Recipe, DryRun]:
    """``libra run --dry-run``: what would be started where. Touches nothing.

    Raises:
        RecipeError: every problem of the recipe at once.
        LibraError: nothing runs by the prices that the recipe names.
    """
    recipe = load_recipe(recipe_path)
    placed = first_plan(recipe)
    return recipe, DryRun(placed[0], dry_run(recipe, placed=placed), _memory_of(recipe, *placed))


def _memory_of(recipe: Recipe, plan: Plan, slots: tuple[Slot, ...]) -> tuple[str, ...]:
    if recipe.model.path is None:
        return ()
    file = Path(recipe.model.path).expanduser() / "config.json"
    name = Path(recipe.model.path).name
    try:
        shape = Architecture.from_config(json.loads(file.read_bytes()), str(file))
        source = f"by {file}"
    except (OSError, ValueError, LibraError) as error:
        problem = (
            "is not on this machine" if isinstance(error, OSError) else f"says too little: {error}"
        )
        if name not in PUBLISHED:
            return (f"what memory goes to is not known: {file} {problem}",)
        shape = PUBLISHED[name]
        source = f"{file} {problem}; by what is published of {name}"
    said = f"{source}: {shape.parameters / 1e9:.1f} billion parameters"
    return (said, *memory_table(recipe, plan, slots, shape))


def run(
    recipe: Recipe,
    recipe_path: Path,
    run_dir: Path,
    *,
    resume: bool,
    watch: Callable[[Record], None],
    note: Callable[[str], None],
) -> Path | None:
    """``libra run``: everything, to the end. Returns the report, if there was anything to report.

    Raises:
        LibraError: what a user can act on.
    """
    run_dir = run_dir.absolute()
    first = _first_row(recipe, recipe_path, run_dir)
    goes_on: LastCheckpoint | None = None
    if resume:
        goes_on = last_checkpoint(run_dir)
        first = _continued(first, recipe, run_dir)
    # Found and made once before any host is asked for anything; begun later, with a deadline.
    EnvironmentFactory(recipe.environment).make()
    monitored = MonitoredRun(run_dir.name, run_dir, recipe.model_dump(mode="json"))
    monitors = Monitors(recipe.run.monitors, monitored, note=note)

    def saved(record: Record) -> None:
        watch(record)
        monitors.on(record)

    with (
        Journal(run_dir, on_error=lambda error: note(f"{error}; {error.hint}")) as journal,
        monitors,
    ):
        keep_recipe(recipe, run_dir)
        session = Session(
            recipe,
            run_dir,
            journal,
            first,
            first_plan=partial(explained_first_plan, recipe),
            plan_with=partial(live_planner, recipe),
            watch=saved,
            note=note,
        )
        last = asyncio.run(session.run(goes_on))
    if last.state == "failed":
        raise LibraError(
            f"the run failed: {last.error}",
            hint=f"libra status {run_dir}; libra logs NODE PROCESS shows a process's own words",
        )
    return write_report(run_dir, tolerance=recipe.weight_sync.tolerance, now=time.time())


def _first_row(recipe: Recipe, recipe_path: Path, run_dir: Path) -> RunRecord:
    return RunRecord(
        id=run_dir.name,
        recipe=str(recipe_path),
        state="starting",
        started_at=time.time(),
        ended_at=None,
        target_steps=recipe.run.steps,
        step=0,
        version=0,
        waiting="everyone waits for the hosts",
        error="",
        controller_pid=os.getpid(),
        controller_started=process_started(os.getpid()) or 0.0,
    )


def _continued(first: RunRecord, recipe: Recipe, run_dir: Path) -> RunRecord:
    """The row of a run that goes on: what it has reached stays told, whatever happens next."""
    before = recipe_of(run_dir)
    changed = [
        name
        for name in ("nodes", "model", "environment")
        if getattr(before, name) != getattr(recipe, name)
    ]
    if changed:
        raise StateError(
            f"{run_dir} was made from a recipe with other {', '.join(changed)}",
            hint=f"give the recipe it was made from; what it said is in {run_dir / RECIPE}",
        )
    with Reader(run_dir) as reader:
        row = reader.run()
    return replace(first, step=row.step, version=row.version, started_at=row.started_at)


def last_checkpoint(run_dir: Path) -> LastCheckpoint:
    """The newest checkpoint of a run, and what the run has written.

    Raises:
        StateError: there is none, or the run is still going on.
    """
    with Reader(run_dir) as reader:
        if reader.run().state in LIVE and controller_alive(reader):
            raise StateError(
                f"{run_dir} is still running", hint=f"libra stop {run_dir}, then try again"
            )
        saved = [step.checkpoint for step in reader.steps() if step.checkpoint]
        incarnations = [version.trainer_incarnation for version in reader.versions()]
        records = records_in_order(reader)
    if not saved:
        raise StateError(
            f"{run_dir} has no checkpoint to go on from", hint="start it anew: libra run RECIPE"
        )
    return LastCheckpoint(saved[-1], max(incarnations, default=0), records)
