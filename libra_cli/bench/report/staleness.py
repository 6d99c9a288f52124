"""The table that ``libra bench staleness`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from libra_cli.bench.report.sheets import Report
from libra_cli.bench.report.terminal import Sheet
from libra_cli.bench.results import interval
from libra_cli.bench.staleness import RuleRow

_COLUMNS = (
    "",
    "tokens/s",
    "over\nhold",
    "over\nbound",
    "age",
    "oldest",
    "closed",
    "longest\ntenth",
    "length",
)


def staleness_report(rows: Sequence[RuleRow]) -> Report:
    """A table a trace and bound: throughput beside age and bias, means over the seeds."""
    places = dict.fromkeys((row.trace, row.bound) for row in rows)
    sheets = [
        _sheet(f"{trace}, bound {bound}", [r for r in rows if (r.trace, r.bound) == (trace, bound)])
        for trace, bound in places
    ]
    return Report(tuple(sheets), {"staleness": [asdict(row) for row in rows]})


def _sheet(title: str, rows: Sequence[RuleRow]) -> Sheet:
    by_rule: dict[str, list[RuleRow]] = {}
    for row in rows:
        by_rule.setdefault(row.rule, []).append(row)
    first = next(iter(by_rule))
    table = [_line(name, mine, by_rule[first]) for name, mine in by_rule.items()]
    notes = (
        f"means over {len(by_rule[first])} seeds; over {first}: ± 95 % interval, seed by seed",
        "over bound: of trained tokens; age, oldest: versions behind, over tokens",
        "closed: groups that were trained before all their members were finished",
        "longest tenth of their members, %: trained / still played at the end / lost",
        "length: mean of trained members over that of all, in generated tokens",
    )
    return Sheet(title, _COLUMNS, table, notes)


def _line(name: str, rows: Sequence[RuleRow], base: Sequence[RuleRow]) -> tuple[str, ...]:
    def mean(attribute: str) -> float:
        return fmean(getattr(row, attribute) for row in rows)

    ends = [mean(f"longest_{what}") for what in ("trained", "later", "lost")]
    bias = " / ".join(f"{100 * share:.0f}" for share in ends)
    return (
        name,
        f"{mean('throughput_tok_s'):,.0f}",
        "" if rows is base else _gain(rows, base),
        f"{mean('over_bound'):.1%}",
        f"{mean('age_mean'):.2f}",
        f"{max(row.age_max for row in rows)}",
        f"{mean('closed'):.0%}",
        bias,
        f"{mean('trained_length') / mean('played_length'):.0%}",
    )


def _gain(rows: Sequence[RuleRow], base: Sequence[RuleRow]) -> str:
    of_base = {row.seed: row.throughput_tok_s for row in base}
    gains = [row.throughput_tok_s / of_base[row.seed] - 1 for row in rows]
    spread = interval(gains)
    sure = "" if spread is None else f"±{50 * (spread[1] - spread[0]):.0f}"
    return f"{100 * fmean(gains):+.0f}{sure} %"
