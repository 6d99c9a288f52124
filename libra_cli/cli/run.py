"""``libra run`` and ``libra attach``: a run in this terminal, without one, and seen again."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra_cli.cli.completion import RunDir
from libra_cli.cli.hosts import RecipePath
from libra_cli.cli.terminal import PrintingConsole, err, errors_told, out
from libra_cli.config.errors import ExitCode

if TYPE_CHECKING:
    from libra_cli.app.dry_run import DryRun
    from libra_cli.config.recipe import Recipe
    from libra_cli.core.launch.process import ProcessSpec
    from libra_cli.core.preflight.dry_run import HostPlan


def run(
    recipe: RecipePath,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started where; start nothing.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with this run, where it was killed or from its last checkpoint."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of run.seed.")] = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Go on without this terminal, once the hosts are ready."),
    ] = False,
    into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a complete agentic RL job on the recipe's hosts."""
    from libra_cli.app.dry_run import plan_of, refuse_unfit
    from libra_cli.runtime.store.run_directory import new_run_dir
    from libra_cli.runtime.trajectory_source import check_source

    with errors_told():
        loaded, told = plan_of(recipe, resume)
        if dry_run:
            _print_dry_run(told)
            check_source(loaded)
            refuse_unfit(recipe, told)
            return
        if seed is not None:
            spec = loaded.run.model_copy(update={"seed": seed})
            loaded = loaded.model_copy(update={"run": spec})
        given = resume or into
        with nullcontext(given) if given else new_run_dir(loaded.run) as run_dir:
            if detach:
                seeded = [] if seed is None else ["--seed", str(seed)]
                where = ["--resume" if resume else "--into", str(run_dir)]
                _detach(run_dir, ["run", str(recipe), *where, *seeded])
            else:
                run_here(loaded, recipe, run_dir, resume=resume is not None)


def attach(run_dir: RunDir = None) -> None:
    """Show a run live, as libra run does; Ctrl-C ends this and not the run."""
    from libra_cli.app import attach as commands
    from libra_cli.report.html.run_report import REPORT
    from libra_cli.report.terminal.progress import Progress
    from libra_cli.runtime.store.run_directory import newest_run

    with errors_told():
        run_dir = run_dir or newest_run()
        began = commands.started_at(run_dir)
        try:
            with Progress(out, name=run_dir.resolve().name, began=began) as progress:
                commands.attach(run_dir, commands.Watched(progress.on, progress.note))
        except KeyboardInterrupt:
            _print_goes_on(run_dir)
            return
        report = run_dir / REPORT
        _print_end(run_dir, None, report if report.is_file() else None)


def run_here(recipe: Recipe, path: Path, run_dir: Path, *, resume: bool) -> None:
    """Carry a run out in this terminal to its end; exits with its code if it did not finish."""
    from libra_cli.app import run as commands
    from libra_cli.app.what_if.certificate import certify
    from libra_cli.report.terminal.lasting_output import keep_output
    from libra_cli.report.terminal.progress import Progress
    from libra_cli.runtime.store.run_directory import CONSOLE_LOG

    keep_output(run_dir.absolute() / CONSOLE_LOG)
    with Progress(out, name=run_dir.name) as progress:
        report = commands.run(
            recipe,
            path,
            run_dir,
            resume=resume,
            watch=progress.on,
            note=progress.note,
            certify=certify,
        )
    _print_end(run_dir, path, report)


def _print_end(run_dir: Path, recipe: Path | None, report: Path | None) -> None:
    """Print the end of a run, and exit with its code if it did not finish."""
    from libra_cli.report.status.summary import status_of
    from libra_cli.report.terminal.console import final_view
    from libra_cli.runtime.store.event_log import EVENTS
    from libra_cli.runtime.store.reader import Reader

    with Reader(run_dir) as reader:
        told, steps = status_of(run_dir), reader.steps()
    # The one that began may have lost its terminal, and would go on with colours.
    (out if out.is_terminal else PrintingConsole()).print(final_view(told, steps, report=report))
    state = told.run.state
    if state == "finished":
        return
    goes_on = told.checkpoint or (run_dir / EVENTS).exists()
    again = f" --resume {run_dir}" if goes_on else ""
    path = recipe or told.run.recipe
    out.print(f"go on with: libra run {path}{again}", highlight=False, soft_wrap=True)
    raise typer.Exit(ExitCode.STOPPED if state == "stopped" else ExitCode.FAILED)


def _detach(run_dir: Path, arguments: list[str]) -> None:
    from libra_cli.app import attach as commands
    from libra_cli.report.terminal.progress import Progress, without_progress

    entry = "from libra_cli.cli.main import main; main()"
    detached = commands.DetachedRun(run_dir, [sys.executable, "-c", entry, *arguments])
    try:
        with Progress(out, name=run_dir.name) as progress:
            told = commands.Watched(progress.on, progress.note)
            status = detached.until_started(told)
    except KeyboardInterrupt:
        status = None
    if status is not None:
        said = detached.said().rstrip()
        if not out.is_terminal:  # its progress is written here already
            said = without_progress(said)
        err.print(said, markup=False, highlight=False, soft_wrap=True)
        # A short run may be over already.
        raise typer.Exit(status if status >= 0 else ExitCode.FAILED)
    _print_goes_on(run_dir)


def _print_goes_on(run_dir: Path) -> None:
    for line in (
        f"{run_dir} goes on without this terminal",
        f"watch it: libra attach {run_dir}",
        f"stop it: libra stop {run_dir}",
    ):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_dry_run(told: DryRun) -> None:
    lines = [f"plan: {reason}" for reason in told.plan.reasons]
    lines += [f"memory: {line}" for line in told.memory]
    lines += [f"tasks: {line}" for line in told.tasks]
    lines += [f"versions: {line}" for line in told.versions]
    lines += [f"faster: {line}" for line in told.advice]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True, highlight=False)
    for host in told.hosts:
        _print_host(host)


def _print_host(host: HostPlan) -> None:
    roles = ", ".join(f"{slot.id} {role}" for slot, role in host.slots) or "environments, agents"
    out.print(f"\n[bold]{host.node.name}[/] ({host.node.reach}): {roles}", highlight=False)
    for spec in host.processes:
        _print_process(spec)


def _print_process(spec: ProcessSpec) -> None:
    ports = ", ".join(f"{what} {port}" for what, port in spec.ports.items())
    title = f"  {spec.process}" + (f"  (ports, or the next free ones: {ports})" if ports else "")
    out.print(title, style="bold", markup=False, soft_wrap=True, highlight=False)
    for name, value in spec.env.items():
        line = f"    {name}={shlex.quote(value)}"
        out.print(line, style="dim", markup=False, soft_wrap=True, highlight=False)
    out.print(f"    {shlex.join(spec.argv)}", markup=False, soft_wrap=True, highlight=False)
