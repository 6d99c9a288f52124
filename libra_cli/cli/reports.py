"""How the report of a measurement is told: on the terminal, and as JSON in a file or there."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer
from rich.markup import escape

from libra_cli.cli.terminal import err, errors_told, out

if TYPE_CHECKING:
    from libra_cli.bench.conditions import Conditions
    from libra_cli.bench.config import ExperimentConfig, Progress
    from libra_cli.bench.report.sheets import Report
    from libra_cli.bench.results import ExperimentResult

Json = Annotated[Path | None, typer.Option("--json", help="One JSON object; - prints only that.")]
_Item = TypeVar("_Item")
Experiment: TypeAlias = "Callable[[ExperimentConfig, Progress], ExperimentResult]"
ProfileName = Annotated[str, typer.Option("--profile", help="Costs of a GPU and model, or a file.")]


@contextmanager
def working() -> Iterator[Progress]:
    """Draw a line on the terminal that says what is going on, and remove it at the end."""
    with err.status("reading") as status:
        yield lambda text: status.update(escape(text))


@contextmanager
def reporting(json_file: Path | None, out_dir: Path | None = None) -> Iterator[None]:
    """Tell errors, the first of them of a file of the report that could not be written."""
    from libra_cli.bench.report.files import REPORT
    from libra_cli.runtime.result_files import check_place

    with errors_told():
        if json_file is not None and not only_json(json_file):
            check_place(json_file, hint=f"ls -ld {json_file.parent}")
        if out_dir is not None:
            check_place(out_dir / REPORT, hint=f"ls -ld {out_dir}")
        yield


def one_by_one(make: Callable[[Progress], Iterator[_Item]]) -> Iterator[_Item]:
    """Yield what is made, and say on the terminal what is going on until each is there."""
    notes: list[Progress] = [_by_part(err.print)]
    items = make(lambda text: notes[-1](text))
    while True:
        with working() as progress:
            if err.is_terminal:
                notes.append(progress)
            item = next(items, None)
        if item is None:
            return
        yield item


def _by_part(say: Callable[[str], None]) -> Progress:
    """Say each part once, which is what comes before a colon: where no line can be drawn over."""
    told: set[str] = set()

    def note(text: str) -> None:
        part = text.partition(":")[0]
        if part not in told:
            told.add(part)
            say(part)

    return note


def show_report(report: Report, json_file: Path | None) -> None:
    """Print the tables of a report, and write its JSON where that is asked for."""
    from libra_cli.bench.report.terminal import sheets_view
    from libra_cli.bench.results import FORMAT

    write_json(json_file, {"format": FORMAT, **report.body})
    if not only_json(json_file):
        out.print(sheets_view(report.sheets))


def run_experiments(
    experiments: Sequence[Experiment],
    asked: Conditions,
    out_dir: Path | None,
    json_file: Path | None,
) -> None:
    """Run experiments under the same conditions; print and write what came out, as a page too."""
    from libra_cli.bench.config import ExperimentConfig
    from libra_cli.bench.report import files
    from libra_cli.bench.results import to_json

    began, quiet = time.monotonic(), only_json(json_file)
    with reporting(json_file, out_dir):
        config = ExperimentConfig.parse(asked)
        warn(config.warnings)
        with working() as progress:
            results = [experiment(config, progress) for experiment in experiments]
        # First what took long to find out, then the report, which could fail.
        write_json(json_file, to_json(results))
        if not quiet:
            _print(results)
        with working() as progress:
            progress("drawing the report")
            command = f"libra {shlex.join(sys.argv[1:])}"
            report = files.write_report(out_dir, results, config, command)
    if not quiet:
        tell_report(report, began)


def tell_report(path: Path, began: float) -> None:
    """Print where a page is, and how long it took since ``began``, of the monotonic clock."""
    took = f"{time.monotonic() - began:.0f} s"
    out.print(f"report: {path}  ({took})", markup=False, soft_wrap=True, highlight=False)


def _print(results: Sequence[ExperimentResult]) -> None:
    from libra_cli.bench.report.sheets import causes_sheet, regret_sheet
    from libra_cli.bench.report.terminal import comparison_view, notes_view, sheets_view

    for result in results:
        if result.regrets:
            out.print(sheets_view([regret_sheet(result.regrets), causes_sheet(result.regrets)]))
            out.print()
        for comparison in result.comparisons:
            out.print(comparison_view(result.title, comparison))
            out.print()
        if result.notes:
            out.print(notes_view(result.notes))
            out.print()


def warn(lines: Sequence[str]) -> None:
    """Print what the reader should know before the numbers, a line each."""
    for line in lines:
        err.print(line, style="yellow", markup=False, soft_wrap=True, highlight=False)


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
