"""The tables, the JSON and the page of ``libra bench paper``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from libra_cli.bench.paper.experiment import NOT_SHOWN
from libra_cli.bench.paper.tables import GPUS, PaperTable, Told
from libra_cli.bench.report.files import write_page
from libra_cli.bench.report.html import sheets_page
from libra_cli.bench.report.sheets import Report, half_interval, percents
from libra_cli.bench.report.terminal import Sheet, amount, plus_minus


def paper_report(tables: Sequence[PaperTable]) -> Report:
    """A sheet a table, and at last what is not shown."""
    missing = Sheet(
        "published, and not shown here", (), (), [f"{what}: {why}" for what, why in NOT_SHOWN]
    )
    body = {
        "tables": [asdict(table) for table in tables],
        "not_shown": [{"what": what, "why": why} for what, why in NOT_SHOWN],
    }
    return Report((*map(paper_sheet, tables), missing), {"paper": body})


def paper_page(found: Sequence[Sheet], directory: Path | None, command: str) -> Path:
    """Write the tables as ``bench.html`` and return where; raises LibraError if that fails."""
    about = f"{GPUS} A800 · Qwen3-14B · arXiv 2606.03077 and 2504.15930"
    page = sheets_page("published, and simulated here", found, about=about, command=command)
    return write_page(directory, page)


def paper_sheet(table: PaperTable) -> Sheet:
    """Return the sheet of one table."""
    rows = [
        (row.what, told(row.published), told(row.shipped), told(row.as_published))
        for row in table.rows
    ]
    why = [f"why they differ: {line}" for line in table.why]
    return Sheet(table.title, ("", "published", *table.columns), rows, (*why, *table.notes))


def told(what: Told) -> str:
    """Return a number with its unit and half its interval; words as they are."""
    if what is None:
        return ""
    if isinstance(what, str):
        return what
    value, spread = what.value, what.ci95
    if what.unit == "change":
        return f"{percents(value)}{half_interval(spread)} %"
    if what.unit == "share":
        return f"{value * 100:.1f}{half_interval(spread)} %"
    return f"{amount(value)}{plus_minus(value, spread)} {what.unit}"
