"""``libra doctor`` and ``libra setup``: hosts before a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra_cli.cli.terminal import err, errors_told, out
from libra_cli.config.errors import ExitCode

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from libra_cli.core.preflight.findings import Finding

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]


def doctor(
    recipe: RecipePath,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what needs no root, and examine again.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON list of findings; libra help hosts.")
    ] = False,
) -> None:
    """Check every host of a recipe: versions, GPUs, memory, network, model. Starts no run."""
    from libra_cli.app import hosts as commands
    from libra_cli.core.preflight.findings import stopping

    with errors_told():
        found = _examined(recipe, shown=not as_json)
        if fix:
            with _progress() as progress:
                told = commands.mend(recipe, found, progress)
            for line in told or ["nothing here can be mended without root or the recipe"]:
                err.print(line, markup=False, highlight=False)
            found = _examined(recipe, shown=not as_json) if told else found
        if as_json:
            typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        if stopping(found):
            raise typer.Exit(ExitCode.HOST_PROBLEM)


def _examined(recipe: Path, *, shown: bool) -> list[Finding]:
    from libra_cli.app import hosts as commands
    from libra_cli.report.terminal.findings import findings_view

    began = time.monotonic()
    with err.status("examining") as status:
        found = commands.doctor(recipe, on_stage=status.update)
    if shown:
        out.print(findings_view(found, seconds=time.monotonic() - began))
    return found


def setup(
    recipe: RecipePath,
    wheels: Annotated[
        Path | None,
        typer.Option(
            help="A directory of wheels here, for hosts without internet.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    index: Annotated[str | None, typer.Option(help="The URL of a package index.")] = None,
) -> None:
    """Make the Python environment on every host with uv, and copy or verify the model."""
    from libra_cli.app.hosts import setup as prepare

    with errors_told():
        with _progress() as progress:
            results = prepare(recipe, progress, wheels=wheels, index=index)
        for result in results:
            for line in result.done:
                out.print(f"{result.host}: {line}", markup=False, highlight=False)
            if result.error:
                err.print(result.error, style="red", markup=False, highlight=False)
                if result.hint:
                    err.print(f"next: {result.hint}", markup=False, highlight=False)
        if any(result.error for result in results):
            raise typer.Exit(ExitCode.HOST_PROBLEM)
        out.print(f"next: libra doctor {recipe}", markup=False, highlight=False)


class _HostLines:
    """A line for each host: what is done there, and how much has been copied."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lines: dict[str, TaskID] = {}

    def stage(self, host: str, what: str) -> None:
        """Show the stage that a host is in."""
        self._progress.update(self._line(host), description=f"{host}: {what}")

    def bytes(self, host: str, count: int) -> None:
        """Advance a host's bar by ``count`` copied bytes."""
        self._progress.advance(self._line(host), count)

    def _line(self, host: str) -> TaskID:
        if host not in self._lines:
            self._lines[host] = self._progress.add_task(host, total=None)
        return self._lines[host]


@contextmanager
def _progress() -> Iterator[_HostLines]:
    from rich.progress import (
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        yield _HostLines(progress)
