"""One function per command: wires recipe, core and edge together; decides nothing.

A run directory on the controller, ``<run.directory>/<name>-<time>``:

    recipe.json   the recipe, resolved, secrets masked  libra.db      the journal
    model/        the tokenizer's files                 report.html   made at the end
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from libra_cli.app.costs import live_planner
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import initial_plan
from libra_cli.core.launch.dry_run import HostPlan, dry_run
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.types import Plan
from libra_cli.report.html.run_report import write_report
from libra_cli.report.status.summary import (
    RunSummary,
    controller_alive,
    newest_run,
    process_started,
    summary,
)
from libra_cli.runtime.episodes.player import EnvironmentFactory
from libra_cli.runtime.hosts.cluster import host_of, transport_to
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.session import Session
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader

RUNS = Path("runs")
RESOLVED = "recipe.json"
STOP_TIMEOUT_S = 300.0
POLL_S = 0.2


def plan_of(recipe_path: Path) -> tuple[Recipe, Plan, tuple[HostPlan, ...]]:
    """``libra run --dry-run``: what would be started where. Touches nothing.

    Raises:
        RecipeError: every problem of the recipe at once.
    """
    recipe = load_recipe(recipe_path)
    return recipe, initial_plan(recipe), dry_run(recipe)


def new_run_dir(recipe: Recipe) -> Path:
    """A fresh run directory's path; nothing is created yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{recipe.run.name}-{stamp}{more}" for more in ("", *(f"-{n}" for n in range(2, 99))))
    return next(path for name in names if not (path := Path(recipe.run.directory) / name).exists())


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
    checkpoint, trainer_incarnation = "", 0
    if resume:
        checkpoint, trainer_incarnation = last_checkpoint(run_dir)
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
        _write_private(run_dir / RESOLVED, recipe.model_dump_json(indent=2))
        session = Session(
            recipe,
            run_dir,
            journal,
            first,
            plan_with=partial(live_planner, recipe),
            watch=saved,
            note=note,
        )
        last = asyncio.run(session.run(checkpoint, trainer_incarnation))
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
    before = resolved(run_dir)
    changed = [
        name
        for name in ("nodes", "model", "environment")
        if getattr(before, name) != getattr(recipe, name)
    ]
    if changed:
        raise StateError(
            f"{run_dir} was made from a recipe with other {', '.join(changed)}",
            hint=f"give the recipe it was made from; what it said is in {run_dir / RESOLVED}",
        )
    with Reader(run_dir) as reader:
        row = reader.run()
    return replace(first, step=row.step, version=row.version, started_at=row.started_at)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def last_checkpoint(run_dir: Path) -> tuple[str, int]:
    """The newest checkpoint of a run, and the number of its last trainer.

    Raises:
        StateError: there is none, or the run is still going on.
    """
    with Reader(run_dir) as reader:
        if controller_alive(reader):
            raise StateError(
                f"{run_dir} is still running", hint=f"libra stop {run_dir}, then try again"
            )
        saved = [step.checkpoint for step in reader.steps() if step.checkpoint]
        incarnations = [version.trainer_incarnation for version in reader.versions()]
    if not saved:
        raise StateError(
            f"{run_dir} has no checkpoint to go on from", hint="start it anew: libra run RECIPE"
        )
    return saved[-1], max(incarnations, default=0)


def status(run_dir: Path | None) -> RunSummary:
    """``libra status``: of this run, or of the newest one.

    Raises:
        StateError: there is no such run.
    """
    with Reader(run_dir or newest_run(RUNS)) as reader:
        return summary(reader, now=time.time())


async def logs(
    node: str, process: str | None, run_dir: Path | None, *, follow: bool, lines: int
) -> AsyncIterator[str]:
    """``libra logs``: the log of one process on a host, or of all of them, line by line.

    Raises:
        StateError: no such run, node or process.
        HostError: the host cannot be reached.
    """
    where = run_dir or newest_run(RUNS)
    with Reader(where) as reader:
        rows = [row for row in reader.processes() if row.node == node]
    chosen = [row for row in rows if process in (None, row.process)]
    if not chosen:
        known = ", ".join(sorted({row.process for row in rows})) or "none"
        raise StateError(
            f"{where} has no process {process or ''} on {node!r} (there: {known})",
            hint=f"libra status {where} lists the nodes",
        )
    transport = transport_to(resolved(where).node(node))
    await transport.connect()
    try:
        flags = ["-F"] if follow else []
        stream = await transport.open_stream(
            ["tail", "-n", str(lines), *flags, *(row.log for row in chosen)]
        )
        while line := await stream.readline():
            yield line.decode(errors="replace").rstrip("\n")
    finally:
        await transport.close()


def resolved(run_dir: Path) -> Recipe:
    """The recipe a run was made from, without its secrets.

    Raises:
        StateError: the run directory has none that can be read.
    """
    try:
        return Recipe.model_validate_json((run_dir / RESOLVED).read_text())
    except (OSError, ValueError) as error:
        raise StateError(
            f"{run_dir} has no usable {RESOLVED}: {error}", hint=f"ls {run_dir}"
        ) from error


def stop(run_dir: Path, *, at_once: bool, note: Callable[[str], None]) -> list[str]:
    """``libra stop``: ask the controller, or clean up after one that is gone.

    Returns:
        What could not be proved gone; empty when nothing is left.

    Raises:
        StateError: no such run, or the controller does not come to an end.
    """
    with Reader(run_dir) as reader:
        row, alive = reader.run(), controller_alive(reader)
        home = str(reader.meta.get("host"))
    if alive and home != os.uname().nodename:
        raise StateError(
            f"{run_dir} was started on {home}, and only there its controller can be told to stop",
            hint=f"on {home}: libra stop {run_dir}",
        )
    if alive:
        _interrupt(row, at_once=at_once)
        note("waiting for the controller: checkpoint, drain, stop")
        _await_end(row, run_dir)
    note("asking every host what is left of this run")
    return asyncio.run(_stop_remains(resolved(run_dir), row.id))


def _interrupt(row: RunRecord, *, at_once: bool) -> None:
    try:
        pidfd = os.pidfd_open(row.controller_pid)
    except ProcessLookupError:
        return  # it has just come to its end
    try:
        # Looked at again with the descriptor in hand: now the pid cannot be recycled under us.
        if process_started(row.controller_pid) == row.controller_started:
            for _ in range(2 if at_once else 1):
                signal.pidfd_send_signal(pidfd, signal.SIGINT)
                time.sleep(POLL_S)
    finally:
        os.close(pidfd)


def _await_end(row: RunRecord, run_dir: Path) -> None:
    give_up = time.monotonic() + STOP_TIMEOUT_S
    while process_started(row.controller_pid) == row.controller_started:
        if time.monotonic() > give_up:
            raise StateError(
                f"the controller (pid {row.controller_pid}) is still stopping",
                hint=f"libra stop --now {run_dir}",
            )
        time.sleep(POLL_S)


async def _stop_remains(recipe: Recipe, run_id: str) -> list[str]:
    left: list[str] = []
    for node in recipe.nodes:
        host = host_of(node)
        try:
            left += [f"{node.name}: {line}" for line in await host.stop_remains(run_id)]
        except LibraError as error:
            left.append(f"{node.name}: {error}")
    return left
