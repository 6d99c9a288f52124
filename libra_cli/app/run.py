"""``libra run``: a recipe from its first host to its report, and one that was stopped again.

the parts of the recipe -> run directory and its database -> where it goes on, if it does
    -> hosts -> first plan -> machine and driver -> end   (``runtime.session``)
    -> what was lost to the best plan that stays (``what_if.certificate``) -> report
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from libra_cli.app.costs import live_planner
from libra_cli.app.export import card_of
from libra_cli.app.resume import (
    begin_with,
    continued,
    refuse_while_alive,
    where_to_go_on,
)
from libra_cli.config.errors import LibraError
from libra_cli.config.on_resume import RecipeChange
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import known_secrets, masker
from libra_cli.core.records import Record, RunRecord
from libra_cli.report.html.run_report import write_report
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.new_run import Planning
from libra_cli.runtime.run_records import Listeners, open_records
from libra_cli.runtime.session import Session
from libra_cli.runtime.store.controller_process import process_started
from libra_cli.runtime.supervision.quotations import masked_errors
from libra_cli.runtime.trajectory_source import check_source


def run(
    recipe: Recipe,
    recipe_path: Path,
    run_dir: Path,
    *,
    resume: bool,
    watch: Callable[[Record], None],
    note: Callable[[str], None],
    certify: Callable[[Path], None],
) -> Path | None:
    """``libra run``: everything, to the end. Returns the report, if there was anything to report.

    ``certify`` is told of a run that has ended, before its report is made.

    Raises:
        LibraError: what a user can act on.
    """
    mask = masker(known_secrets(recipe))
    told = Listeners(watch, lambda text: note(mask(text)), mask)
    with masked_errors(mask):
        run_dir = run_dir.absolute()
        _run(recipe, recipe_path, run_dir, told, resume=resume)
        certify(run_dir)
        tolerance = recipe.weight_sync.tolerance
        return write_report(run_dir, tolerance=tolerance, now=time.time())


def _run(
    recipe: Recipe, recipe_path: Path, run_dir: Path, told: Listeners, *, resume: bool
) -> None:
    row = _first_row(recipe_path, run_dir, recipe.run.steps)
    changed: tuple[RecipeChange, ...] = ()
    if resume:
        refuse_while_alive(run_dir)
        row, changed = continued(row, recipe, run_dir)
    planning = Planning(
        first_plan=begin_with(recipe, run_dir if resume else None),
        planner=partial(live_planner, recipe),
    )
    check_source(recipe)
    with open_records(recipe, run_dir, row, told) as records:
        for change in changed:
            records.note(f"goes on with another recipe: {change}")
        secrets = RunSecrets.of(run_dir)
        goes_on = where_to_go_on(recipe, run_dir, secrets, records.note) if resume else None
        session = Session(recipe, run_dir, records, secrets, planning, partial(card_of, run_dir))
        last = asyncio.run(session.run(goes_on))
    if last.state == "failed":
        raise LibraError(
            f"the run failed: {last.error}",
            hint=f"libra status {run_dir}; libra logs NODE PROCESS shows a process's own words",
        )


def _first_row(recipe_path: Path, run_dir: Path, steps: int) -> RunRecord:
    return RunRecord(
        id=run_dir.name,
        recipe=str(recipe_path),
        state="starting",
        started_at=time.time(),
        ended_at=None,
        target_steps=steps,
        step=0,
        version=0,
        waiting="everyone waits for the hosts",
        error="",
        controller_pid=os.getpid(),
        controller_started=process_started(os.getpid()) or 0.0,
    )
