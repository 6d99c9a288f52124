"""``libra collect``: one archive of a run, for a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli.completion import RunDir
from libra_cli.cli.terminal import err, errors_told, out


def collect(
    run_dir: RunDir = None,
    target: Annotated[
        Path | None, typer.Option("-o", "--output", help="The archive; here if left out.")
    ] = None,
) -> None:
    """Put logs, versions, recipe and database of a run into one archive, without secrets."""
    from libra_cli.app.collect import collect

    with errors_told():
        with err.status("collecting"):
            made = collect(run_dir, target)
        for name, size in made.files:
            out.print(f"  {name}  {size / 1e3:,.1f} kB", markup=False, highlight=False)
        for problem in made.problems:
            err.print(f"not there: {problem}", markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"{made.masked} secrets masked, token ids left out; look through it before you send it",
        highlight=False,
    )
    told = f"{made.path} ({made.bytes / 1e6:,.2f} MB)"
    out.print(told, markup=False, highlight=False, soft_wrap=True)
