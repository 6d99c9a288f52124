"""What a person sees of an experiment in a terminal: its table, and what it says.

Everything fits 80 columns. Nothing here computes: intervals and marks come from ``bench.results``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.report.terminal.plots import Portable

if TYPE_CHECKING:
    from libra_cli.bench.results import Comparison, ComparisonSummary, Difference, Interval


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of words. The first column is on the left, the others on the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


OURS = "libra"
BEST, LEVEL = "*", "≈"
_WORDS = {"makespan_s": "makespan", "throughput_tok_s": "throughput"}
_NAME_WIDTH = 20


def comparison_view(title: str, comparison: Comparison) -> RenderableType:
    """Return one comparison: title, table, legend, and a sentence about libra."""
    head = Text.assemble((title, "bold"), (f"  {subject(comparison)}", "default"), overflow="fold")
    parts: list[RenderableType] = [head, Padding(_table(comparison), (0, 0, 0, 1))]
    parts.append(Padding(Text(legend(comparison), style="dim"), (0, 0, 0, 1)))
    parts += [Padding(Text(line), (0, 0, 0, 1)) for line in verdicts(comparison)]
    return Portable(Group(*parts))


def notes_view(notes: Sequence[str]) -> RenderableType:
    """Return sentences, each with a dot before it."""
    lines = Table.grid(padding=(0, 1, 0, 0))
    for note in notes:
        lines.add_row(" ·", Text(note))
    return Portable(lines)


def sheets_view(sheets: Sequence[Sheet]) -> RenderableType:
    """Return title, table and notes of each sheet."""
    return Portable(Group(*(part for sheet in sheets for part in _sheet(sheet))))


# -- words, shared with the report -----------------------------------------------------------------


def subject(comparison: Comparison) -> str:
    """Return the trace and the variant of a comparison."""
    return comparison.trace + (f", {comparison.variant}" if comparison.variant else "")


def legend(comparison: Comparison) -> str:
    """Return what the marks and columns of a table mean."""
    seeds = max(summary.seeds for summary in comparison.summaries)
    words = ["one seed, so no intervals"]
    if seeds > 1:
        words = [
            f"± 95 % interval over {seeds} seeds",
            f"{BEST} the best, {LEVEL} not significantly different from it (paired by seed)",
        ]
    words.append("idle: rollout/training")
    if has_share(comparison):
        words.append("of the bound: the least makespan there can be, over its own")
    else:
        base = next((s.baseline for s in comparison.summaries if s.baseline), None)
        if base is not None:
            words.append(f"against: {_word(comparison)} against {name_of(comparison, base)}")
    return "; ".join(words)


def verdicts(comparison: Comparison) -> list[str]:
    """Return sentences on libra, if it is compared: against the baseline, and the best other."""
    lines = []
    for name, summary in zip(comparison.names, comparison.summaries, strict=True):
        if OURS not in (summary.policy, summary.planner) or name != OURS:
            continue
        against = {d.to: d for d in (summary.baseline, summary.rival) if d is not None}
        differences = [f"{_against(d)} {name_of(comparison, d)}" for d in against.values()]
        if differences:
            lines.append(f"{name}: {_word(comparison)} " + "; ".join(differences))
    return lines


def name_of(comparison: Comparison, difference: Difference) -> str:
    """Return the name of the contender that a difference is taken to."""
    pairs = zip(comparison.names, comparison.summaries, strict=True)
    return next(name for name, summary in pairs if summary.contender == difference.to)


def mark(summary: ComparisonSummary) -> str:
    """Return the mark of the best causal contender, or of one that
    cannot be told from it; else empty.
    """
    if summary.best:
        return BEST
    level = summary.rival is not None and summary.rival.ci95 is not None
    return LEVEL if level and not summary.significant else ""


def has_share(comparison: Comparison) -> bool:
    """Whether a contender has a share of the bound."""
    return any(summary.share_of_bound is not None for summary in comparison.summaries)


def amount(value: float) -> str:
    """Return a number in few characters: ``0.42``, ``12.3``,
    ``312``, ``9,120``, ``12.3k``, ``1.2M``.
    """
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit * 0.99995:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 999.5 else f"{scaled:.0f}{unit}"
    if size >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2g}"


def plus_minus(mean: float, interval: Interval | None) -> str:
    """Return half the interval as a share of the mean: ``±2%``,
    ``±.4%``; empty without an interval.
    """
    if interval is None or mean == 0:
        return ""
    return f"±{_percent(abs((interval[1] - interval[0]) / 2 / mean))}"


def share(value: float | None, interval: Interval | None) -> str:
    """Return a share with its interval, ``92±3%``; a dash where nothing can be said."""
    if value is None:
        return "–"
    half = "" if interval is None else f"±{(interval[1] - interval[0]) * 50:.0f}"
    return f"{value * 100:.0f}{half}%"


def change(difference: Difference | None) -> str:
    """Return a difference with its interval, ``-12±3%``,
    ``+1.5±.4%``; a dash for the baseline itself.
    """
    if difference is None:
        return "–"
    digits = 0 if abs(difference.mean) >= 0.0995 else 1
    half = ""
    if difference.ci95 is not None:
        half = f"±{(difference.ci95[1] - difference.ci95[0]) * 50:.{digits}f}".replace("±0.", "±.")
    return f"{difference.mean * 100:+.{digits}f}{half}%"


# -- pieces ----------------------------------------------------------------------------------------


def _sheet(sheet: Sheet) -> Iterator[RenderableType]:
    table = _bare()
    for index, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index))
    for row in sheet.rows:
        table.add_row(*row)
    yield Text(sheet.title, style="bold")
    if sheet.rows:
        yield Padding(table, (0, 0, 0, 1))
    for note in sheet.notes:
        yield Padding(Text(note, style="dim"), (0, 0, 0, 1))


def _bare() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)


def _table(comparison: Comparison) -> Table:
    table = _bare()
    table.add_column("", width=1)
    table.add_column("", overflow="fold", max_width=_NAME_WIDTH)
    last = "of the\nbound" if has_share(comparison) else "against"
    for name in (
        "tok/s",
        "makespan\ns",
        "P50/P99\ns",
        "idle\n%",
        "moves",
        "tokens\nagain",
        last,
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in zip(comparison.names, comparison.summaries, strict=True):
        style = "bold" if summary.best else ""
        table.add_row(
            mark(summary),
            name,
            *cells(summary, has_share(comparison)),
            style=style,
        )
    return table


def cells(summary: ComparisonSummary, by_share: bool) -> list[str]:
    """A row of the table, without its name."""
    mean, ci95 = summary.mean, summary.ci95

    def both(metric: str) -> str:
        return amount(mean[metric]) + plus_minus(mean[metric], ci95[metric])

    if by_share:
        last = share(summary.share_of_bound, summary.share_ci95)
    else:
        last = change(summary.baseline)
    return [
        both("throughput_tok_s"),
        both("makespan_s"),
        f"{_whole(mean['p50_s'])}/{_whole(mean['p99_s'])}",
        f"{mean['idle_rollout'] * 100:.0f}/{mean['idle_train'] * 100:.0f}",
        amount(round(mean["moves"])),
        amount(round(mean["reprefilled_tokens"])),
        last,
    ]


def _whole(seconds: float) -> str:
    return amount(seconds if seconds < 9.5 else round(seconds))


def _word(comparison: Comparison) -> str:
    return _WORDS[comparison.summaries[0].judged_by]


def _against(difference: Difference) -> str:
    words = f"{difference.mean:+.1%}"
    if difference.ci95 is not None:
        low, high = (f"{edge * 100:+.1f}" for edge in difference.ci95)
        words += f" [{low}, {high}]" + ("" if difference.significant else " (not significant)")
    return f"{words} against"


def _percent(part: float) -> str:
    if part >= 0.0095:
        return f"{part:.0%}"
    return f"{part * 100:.1f}%".removeprefix("0")
