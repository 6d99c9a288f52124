"""The tables and the JSON of ``libra bench routing``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

from libra_cli.bench.report.sheets import Report, half_interval, percents
from libra_cli.bench.report.terminal import Sheet
from libra_cli.bench.results import interval
from libra_cli.bench.routing import HELD_OUT, OURS, PUBLISHED, RoutingRow


def routing_report(rows: Sequence[RoutingRow]) -> Report:
    """A table a trace: means over the seeds, and how far each rule is behind the causal tree."""
    sheets = []
    for trace in dict.fromkeys(row.trace for row in rows):
        by_rule: dict[str, list[RoutingRow]] = {}
        for row in rows:
            if row.trace == trace:
                by_rule.setdefault(row.rule, []).append(row)
        sheets.append(_sheet(trace, by_rule))
    return Report(tuple(sheets), {"routing": [asdict(row) for row in rows]})


def _sheet(trace: str, by_rule: Mapping[str, Sequence[RoutingRow]]) -> Sheet:
    ours = by_rule[OURS]
    placements = round(fmean(row.placements for row in ours))
    about = f"of {placements:,} tool returns of held-out tasks (1 in {HELD_OUT}) each"
    notes = (
        f"means over {len(ours)} seeds, {about}",
        "right: placed in the bucket of the tokens left; recall: mean of that over the buckets",
        f"over {OURS}: right, seed by seed, in points; ± 95 % interval",
        "its likeliest: the same tree, by the likeliest bucket and not by mean and P90",
        "moved: share of the contexts, in tokens, that went to another bucket",
        f"published for Search-R1: {PUBLISHED} (arXiv 2606.03077)",
    )
    columns = ("", "right", f"over\n{OURS}", "recall", "moved")
    return Sheet(trace, columns, [_line(rule, by_rule[rule], ours) for rule in by_rule], notes)


def _line(rule: str, rows: Sequence[RoutingRow], ours: Sequence[RoutingRow]) -> tuple[str, ...]:
    over = [row.right - its.right for row, its in zip(rows, ours, strict=True)]
    return (
        rule,
        f"{fmean(row.right for row in rows):.1%}",
        "" if rule == OURS else f"{percents(fmean(over))}{half_interval(interval(over))}",
        f"{fmean(row.recall for row in rows):.1%}",
        f"{fmean(row.moved for row in rows):.1%}",
    )
