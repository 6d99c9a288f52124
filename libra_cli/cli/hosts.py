"""``libra doctor`` and ``libra setup``: hosts before a run."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli.terminal import err, errors_told, out

HOST_PROBLEM = 3
RecipePath = Annotated[Path, typer.Argument(help="The recipe, a YAML file.")]


def doctor(
    recipe: RecipePath,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what needs no root, and examine again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of findings.")] = False,
) -> None:
    """Check every host of a recipe: versions, GPUs, memory, network, model. Starts no run."""
    import json

    from libra_cli.app import doctor as commands
    from libra_cli.core.preflight.findings import stopping
    from libra_cli.report.terminal.findings import findings_view

    with errors_told():
        began = time.monotonic()
        with err.status("examining") as status:
            found = commands.doctor(recipe, on_stage=status.update)
        if as_json:
            typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        else:
            out.print(findings_view(found, seconds=time.monotonic() - began))
        if stopping(found):
            raise typer.Exit(HOST_PROBLEM)
