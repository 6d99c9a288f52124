"""``libra ps`` and ``libra gc``: hosts between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra_cli.cli.terminal import err, errors_told, out
from libra_cli.config.errors import ExitCode

if TYPE_CHECKING:
    from libra_cli.app.operations import HostAnswer

Target = Annotated[
    Path | None, typer.Argument(metavar="RECIPE|RUN_DIR", help="Whose hosts are asked.")
]
HostNames = Annotated[
    list[str] | None, typer.Option("--host", help="Ask this host too, as ssh knows it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="A JSON list, an object a host.")]


def ps(target: Target = None, host: HostNames = None, as_json: AsJson = False) -> None:
    """List what runs of yours own on hosts, and who else holds their GPUs. Changes nothing."""
    from libra_cli.app import operations as commands
    from libra_cli.report.terminal.operations import owned_view

    with errors_told():
        answers = commands.owned(commands.targets(target, host or []))
        if as_json:
            typer.echo(json.dumps([asdict(one) for one in answers], indent=2))
        else:
            out.print(owned_view([asdict(one) for one in answers]))
        _refuse_silence(answers)


def gc(
    target: Target = None,
    host: HostNames = None,
    days: Annotated[
        float, typer.Option(min=0.0, help="Only what was not used for so many days.")
    ] = 14.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Of dead runs the last checkpoint too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove what old runs have left on hosts; libra help operations has the rules."""
    from libra_cli.app import operations as commands
    from libra_cli.config.text import printable

    with errors_told():
        chosen = commands.targets(target, host or [])
        answers = commands.collect_old(chosen, days=days, everything=everything, dry_run=dry_run)
        for one in answers:
            for thing in one.told or ():
                why = f"{thing['bytes'] / 1e6:.1f} MB, {thing['why']}"
                line = printable(f"{one.node}: {thing['path']} ({why})")
                out.print(line, markup=False, highlight=False, soft_wrap=True)
        total = sum(thing["bytes"] for one in answers for thing in one.told or ())
        verb = "would be removed" if dry_run else "removed"
        if any(not one.error for one in answers):
            out.print(f"{total / 1e6:.1f} MB {verb}", highlight=False)
        _refuse_silence(answers)


def _refuse_silence(answers: Sequence[HostAnswer]) -> None:
    """Name the hosts that were not looked at, and exit if there are any."""
    silent = [one for one in answers if one.error]
    for one in silent:
        told = f"{one.node} was not looked at: {one.error}"
        err.print(told, style="red", markup=False, highlight=False, soft_wrap=True)
        if one.hint:
            err.print(f"next: {one.hint}", markup=False, highlight=False, soft_wrap=True)
    if silent:
        raise typer.Exit(ExitCode.HOST_PROBLEM)
