"""What the checks have told, as lines, as a table, and as a text that can be sent."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tests.gpu.expected import BY_NAME, CHECKS, Kind

COLORS = {"ok": "green", "look": "yellow", "failed": "bold red", "not made": "dim"}


def line_of(result: Mapping[str, Any]) -> Text:
    """One check, as it ends."""
    verdict = result["verdict"]
    return Text.assemble(
        (f"{verdict:>8}", COLORS[verdict]),
        f"  {result['check']:<11}{result['took_s']:6.0f} s  ",
        "; ".join([*result["problems"], result["error"]] if result["error"] else result["problems"])
        or _values(result["measured"]),
    )


def table_of(results: Sequence[Mapping[str, Any]], kind: Kind) -> Table:
    """A row for each check, in the order of the checks."""
    table = Table(title="libra gpu-check", title_justify="left")
    for column, width in (("check", None), ("", None), ("s", None), ("measured", 44)):
        table.add_column(column, width=width, overflow="fold")
    table.add_column("expected", width=34, overflow="fold")
    made = {result["check"]: result for result in results}
    for check in CHECKS:
        result = made.get(check.name)
        if result is None:
            table.add_row(check.name, "[dim]not made", "", f"[dim]{check.shows}", "")
            continue
        verdict = result["verdict"]
        told = [_values(result["measured"]), result["error"]]
        table.add_row(
            check.name,
            f"[{COLORS[verdict]}]{verdict}",
            f"{result['took_s']:.0f}",
            Text("\n".join(filter(None, told))),
            Text(", ".join(check.ranges(kind))),
        )
    return table


def advice(results: Sequence[Mapping[str, Any]]) -> list[Text]:
    """What to look at, and what to do about it."""
    return [
        Text(f"{one['check']}: {'; '.join([*one['problems'], one['error']])}".rstrip("; "))
        + Text(f"\n    next: {BY_NAME[one['check']].otherwise}")
        for one in results
        if one["verdict"] in ("look", "failed")
    ]


def whole(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kind: Kind) -> Group:
    """The table, what to look at, and the machine."""
    facts = Text(", ".join(f"{name} {value}" for name, value in about.items()))
    return Group(table_of(results, kind), *advice(results), facts)


def text_of(shown: Group) -> str:
    """The same without colours."""
    file = io.StringIO()
    Console(file=file, width=120).print(shown)
    return file.getvalue()


def _values(measured: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in measured.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
