"""The ``libra`` command. With the rest of this folder, all that prints or exits with a code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra_cli import __version__
from libra_cli.cli import completion, hosts, operations
from libra_cli.cli.bench import bench
from libra_cli.cli.collect import collect
from libra_cli.cli.completion import RunDir
from libra_cli.cli.explain import explain
from libra_cli.cli.help import show_help
from libra_cli.cli.importing import import_
from libra_cli.cli.init import init
from libra_cli.cli.quickstart import quickstart
from libra_cli.cli.run import attach, run
from libra_cli.cli.serve import serve
from libra_cli.cli.show import show
from libra_cli.cli.tasks import tasks
from libra_cli.cli.terminal import err, errors_told, out
from libra_cli.cli.tinker import tinker
from libra_cli.config.errors import ExitCode, InputError, WrongRun

if TYPE_CHECKING:
    from libra_cli.app.stop import RunToStop

app = typer.Typer(
    help="Agentic RL post-training on plain GPU machines: a list of SSH hosts and one recipe.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(quickstart)
app.command()(init)
app.command("import")(import_)
app.command()(hosts.doctor)
app.command()(hosts.setup)
app.command()(operations.ps)
app.command()(operations.gc)
app.command()(run)
app.command()(attach)
app.command()(collect)
app.command()(explain)
app.command("help")(show_help)
app.command()(serve)
app.command()(show)
app.command()(tinker)
app.add_typer(bench, name="bench")
app.add_typer(tasks, name="tasks")

Json = Annotated[bool, typer.Option("--json", help="One JSON object; libra help status.")]


def _version(asked: bool) -> None:
    if asked:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Agentic RL post-training on plain GPU machines."""


@app.command()
def status(
    run_dir: RunDir = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it live until Ctrl-C.")] = False,
) -> None:
    """Show a run: slots, servers, step, reward, who waits on whom."""
    from libra_cli.cli.tinker import serves_tinker, show_service
    from libra_cli.report.status.summary import status_of, to_json
    from libra_cli.report.terminal.console import status_view

    with errors_told():
        if watch:
            _refuse_watching(run_dir, as_json=as_json, of_tinker=serves_tinker(run_dir))
        if serves_tinker(run_dir):
            show_service(run_dir, as_json=as_json)
        elif as_json:
            typer.echo(to_json(status_of(run_dir)))
        elif watch:
            _watch(run_dir)
        else:
            out.print(status_view(status_of(run_dir), now=time.time()))


def _refuse_watching(run_dir: Path | None, *, as_json: bool, of_tinker: bool) -> None:
    """Raise InputError where ``--watch`` would have nothing to keep live."""
    if as_json:
        raise InputError(
            "--json prints one object and ends, and --watch goes on until Ctrl-C",
            hint="libra status --json, every few seconds at most",
        )
    if of_tinker:
        raise InputError(
            f"{run_dir} is of libra tinker, which --watch does not show",
            hint=f"libra status {run_dir}",
        )


def _watch(run_dir: Path | None) -> None:
    from rich.live import Live

    from libra_cli.report.status.summary import status_of
    from libra_cli.report.terminal.console import status_view

    told = status_of(run_dir)
    with Live(status_view(told, now=time.time()), console=out, auto_refresh=False) as live:
        try:
            while told.run.state in ("starting", "running"):
                time.sleep(1.0)
                told = status_of(run_dir)
                live.update(status_view(told, now=time.time()), refresh=True)
        except KeyboardInterrupt:
            return


@app.command()
def rebalance(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_DIR|RECIPE", help="The newest run under runs/ if left out."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only explain; nothing is moved.")
    ] = False,
    to: Annotated[
        str, typer.Option(help='Order a split: slots by role, as in "rollout=3,gradient=1".')
    ] = "",
    pin: Annotated[
        list[str] | None,
        typer.Option(help="Hold a slot: SLOT=rollout, gradient, train, or auto to let go."),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(help="Order one larger server of slots side by side, as gpu-01/0+1."),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Order its slots to serve apart again.")
    ] = None,
    as_json: Json = False,
    profile: Annotated[
        str | None, typer.Option(help="Costs of a GPU and model, or a file.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="With a recipe: a file, or a shipped trace's name.")
    ] = None,
) -> None:
    """Ask a live run to plan now, order a split or larger servers by hand, or only explain."""
    from libra_cli.app import rebalance as commands
    from libra_cli.app.rebalance import orders
    from libra_cli.report.status.summary import to_json
    from libra_cli.report.terminal.rebalance import rebalance_view

    ordered = orders.Ordered(to, pin or [], join or [], split or [])
    with errors_told():
        if not dry_run:
            orders.refuse_explaining(as_json=as_json, profile=profile, trace=trace)
            accepted, text = orders.order(target, ordered)
            (out if accepted else err).print(text, markup=False, highlight=False)
            if not accepted:
                raise typer.Exit(ExitCode.WRONG_INPUT)
            return
        orders.refuse_ordering(ordered)
        told = commands.explain(target, trace=trace, profile=profile)
        if as_json:
            typer.echo(to_json(told))
        else:
            out.print(rebalance_view(told))


@app.command()
def logs(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node of the recipe.")],
    process: Annotated[
        str | None, typer.Argument(metavar="PROCESS", help="One process; all if left out.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more.")] = False,
    lines: Annotated[int, typer.Option("-n", help="Lines from the end.")] = 100,
    run_dir: Annotated[Path | None, typer.Option("--run", help="A run directory.")] = None,
) -> None:
    """Show what a process on a host has written."""
    import asyncio

    from libra_cli.app import logs as commands

    async def show() -> None:
        async for line in commands.logs(node, process, run_dir, follow=follow, lines=lines):
            typer.echo(line)

    with errors_told():
        try:
            asyncio.run(show())
        except KeyboardInterrupt:
            return


@app.command()
def export(
    run_dir: RunDir = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of this step; the last checkpoint if left out.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of the best, by evaluation or mean reward.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option(help="Copy it into this directory on this machine.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="The model with its adapter in it, not the adapter.")
    ] = False,
) -> None:
    """Make a Hugging Face directory of a run's checkpoint, which transformers and vLLM load.

    Of a run with training.lora it is the adapter, in PEFT's format.
    """
    from libra_cli.app import export as commands

    with errors_told():
        order = commands.ExportOrder(step, best, to, merge)
        made = commands.export(run_dir, order, note=lambda text: err.print(text, markup=False))
    out.print(f"step {made.step}, {made.bytes / 1e9:.3f} GB", highlight=False)
    where = str(to) if to else f"{made.node}:{made.path}"
    out.print(where, markup=False, highlight=False, soft_wrap=True)


@app.command("eval")
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|MODEL",
            help="A run's best model, of those it has made, or a model's directory.",
            autocompletion=completion.run_directories,
        ),
    ],
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Its hosts play its evaluations.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The result; here if left out.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of a run: the model of this step.")
    ] = None,
) -> None:
    """Play the evaluations of a recipe with a model: servers only, nothing is trained."""
    from libra_cli.app import evaluate as command
    from libra_cli.report.terminal.evaluations import evaluation_table

    with errors_told():
        with err.status("evaluating") as status:
            found = command.evaluate(
                target,
                recipe,
                output,
                step=step,
                told=lambda row: status.update(
                    f"{row.name}: {row.finished + row.failed} of {row.tasks * row.samples}"
                ),
                note=lambda text: err.print(text, markup=False, highlight=False),
            )
        out.print(evaluation_table(found.evaluations))
        found.write()
    out.print(str(found.path), markup=False, highlight=False, soft_wrap=True)


@app.command()
def stop(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN_DIR",
            help="A run directory; if left out, the newest under runs/ that is running, once you "
            "have said yes.",
            autocompletion=completion.run_directories,
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="No checkpoint, no drain.")] = False,
) -> None:
    """Stop a run and prove that nothing of it is left on any host.

    Other commands only look at the newest run; this one may end hours of work.
    Where no run is named it asks first, and without a terminal it refuses.
    """
    from libra_cli.app import stop as commands

    with errors_told():
        run_dir = run_dir or _agreed_on(commands.run_to_stop())
        left = commands.stop(run_dir, at_once=now, note=lambda text: err.print(text, markup=False))
    for line in left:
        err.print(f"not proved gone: {line}", style="red", markup=False, soft_wrap=True)
    if left:
        raise typer.Exit(ExitCode.HOST_PROBLEM)
    out.print("nothing of this run is left on any host", highlight=False)


def _can_be_asked() -> bool:
    return sys.stdin.isatty()


def _agreed_on(found: RunToStop) -> Path:
    """Return the run if the user says yes; exits if not, or if there is nobody to ask."""
    if not _can_be_asked():
        raise WrongRun(
            f"{found.run_dir} is the newest run that is running; no terminal to ask you on",
            hint=f"libra stop {found.run_dir}",
        )
    others = f"; {found.others} more running stay" if found.others else ""
    if typer.confirm(f"Stop {found.run_dir} at step {found.step} of {found.steps}{others}?"):
        return found.run_dir
    out.print("it goes on", highlight=False)
    raise typer.Exit


def main() -> None:
    """Run the ``libra`` command; the entry point of the package."""
    app()
