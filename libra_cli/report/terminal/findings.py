"""What ``libra doctor`` found: a line for each check, then what is wrong and what mends it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.core.preflight.findings import Finding, stopping, warning
from libra_cli.report.terminal.plots import Portable

_MARKS = {
    "stops": ("✗", "bold red"),
    "warns": ("!", "yellow"),
    "fine": ("✓", "green"),
    "unknown": ("?", "yellow"),
}
_PLACES = {
    "host": "on the host",
    "here": "here",
    "recipe": "in the recipe",
    "person": "somebody must",
}


def findings_view(findings: Sequence[Finding], *, seconds: float) -> RenderableType:
    """All findings of an examination that took so many seconds."""
    parts: list[RenderableType] = [_table(findings)]
    for one in (*stopping(findings), *warning(findings)):
        parts += [Text(), _block(one)]
    return Portable(Group(*parts, Text(), _sum(findings, seconds)))


def _table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in dict.fromkeys(one.check for one in findings):
        of_check = [one for one in findings if one.check == check]
        worst = (stopping(of_check) or warning(of_check) or of_check)[0]
        sign, style = _MARKS[worst.severity]
        told = worst.what
        if worst.severity in ("stops", "warns"):
            told = ", ".join(dict.fromkeys(one.host for one in of_check))
        table.add_row(Text(sign, style=style), Text(check), Text(told, overflow="fold"))
    return table


def _block(finding: Finding) -> RenderableType:
    sign, style = _MARKS[finding.severity]
    title = Text(f"{sign} {finding.severity}  ", style=style).append(
        f"{finding.host}: {finding.what}", style="default not bold"
    )
    lines: list[RenderableType] = [title]
    if finding.why:
        lines.append(Padding(Text(finding.why, style="dim"), (0, 0, 0, 9)))
    if finding.remedy is not None:
        place = _PLACES[finding.remedy.place]
        told = Text(f"{place}: ", style="dim").append(finding.remedy.command, style="cyan not dim")
        lines.append(Padding(told, (0, 0, 0, 9)))
    return Group(*lines)


def _sum(findings: Sequence[Finding], seconds: float) -> Text:
    stops, warns = len(stopping(findings)), len(warning(findings))
    fine = sum(one.severity == "fine" for one in findings)
    unknown = sum(one.severity == "unknown" for one in findings)
    not_made = f"{unknown} not made on all hosts, " if unknown else ""
    told = f"{fine} checks fine, {not_made}{warns} warnings, {stops} that stop a run"
    return Text(
        f"{told} ({seconds:.1f} s)", style="bold red" if stops else "yellow" if warns else "green"
    )
