"""How the report of a measurement is told: on the terminal, and as JSON in a file or there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from libra_cli.cli.terminal import err, out

if TYPE_CHECKING:
    from libra_cli.bench.config import Progress
    from libra_cli.bench.report.sheets import Report

Json = Annotated[Path | None, typer.Option("--json", help="One JSON object; - prints only that.")]
ProfileName = Annotated[str, typer.Option("--profile", help="Costs of a GPU and model, or a file.")]


@contextmanager
def working() -> Iterator[Progress]:
    """Draw a line on the terminal that says what is going on, and remove it at the end."""
    with err.status("reading") as status:
        yield lambda text: status.update(escape(text))


def show_report(report: Report, json_file: Path | None) -> None:
    """Print the tables of a report, and write its JSON where that is asked for."""
    from libra_cli.bench.report.terminal import sheets_view
    from libra_cli.bench.results import FORMAT

    write_json(json_file, {"format": FORMAT, **report.body})
    if not only_json(json_file):
        out.print(sheets_view(report.sheets))


def write_json(path: Path | None, body: dict[str, Any]) -> None:
    """Write one JSON object to a file, or to standard output for ``-``."""
    from libra_cli.bench.report import files

    if path is None:
        return
    text = files.json_text(body)
    if only_json(path):
        typer.echo(text, nl=False)
    else:
        files.write(path, text)


def only_json(path: Path | None) -> bool:
    """Whether standard output is for JSON alone."""
    return path is not None and str(path) == "-"
