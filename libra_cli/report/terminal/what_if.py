"""Draws what ``libra bench run`` tells in 80 columns; it computes nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.report.status.what_if import WhatIfResult, WhatIfRow
from libra_cli.report.terminal.console import fact, grid, number, percent
from libra_cli.report.terminal.plots import Portable

_COLUMNS = ("s a step", "total", "change", "tokens/s", "rollout\nidle", "training\nidle")


def what_if_view(told: WhatIfResult) -> RenderableType:
    """The run, how near its simulation is, and what would have been."""
    title = Text.assemble((told.run, "bold"), f"  {told.state}, {told.steps} steps after the first")
    parts: list[RenderableType] = [title, Text(), Padding(_rows(told), (0, 0, 0, 2)), Text()]
    parts.append(Padding(_facts(told), (0, 0, 0, 2)))
    parts += [Padding(Text(f"· {note}", style="dim"), (0, 0, 0, 2)) for note in told.notes]
    return Portable(Group(*parts))


def _rows(told: WhatIfResult) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in told.rows:
        table.add_row(
            Text.assemble(row.name, (f"\n{row.plan}", "dim")),
            number(row.step_s, ".2f"),
            number(row.total_s, ",.0f", " s"),
            _change(row),
            number(row.tokens_per_s, ",.0f"),
            percent(row.idle_rollout),
            percent(row.idle_training),
        )
    return table


def _change(row: WhatIfRow) -> str:
    if row.change is None:
        return ""
    spread = "" if row.change_ci is None else f" ± {100 * row.change_ci:.0f}"
    return f"{100 * row.change:+.0f}{spread} %"


def _facts(told: WhatIfResult) -> Table:
    facts, near, cut = grid(), told.fidelity, told.censored
    error = f"{100 * near.error:+.0f} % of the total time, single steps {near.each_step:.0%} off"
    fact(facts, "simulation", error)
    by = f"servers x {told.corrections.rollout:.2f}, training x {told.corrections.training:.2f}"
    fact(facts, "prices", f"{told.prices}, corrected by what it showed: {by}")
    if cut.trajectories:
        text = f"{cut.trajectories:,} trajectories had not finished, and go on as longer ones did"
        if cut.without_longer:
            text += f"; none was longer than {cut.without_longer:,} of them"
        fact(facts, "unfinished", text)
    fact(facts, "hindsight", told.regret.text)
    return facts
