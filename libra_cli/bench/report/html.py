"""``bench.html``: what an experiment found, in one file that opens without a network.

Drawings as SVG, a few lines of CSS, no script; light or dark as the reader's. It holds a table, a
drawing of the contenders with their intervals for every comparison, and of the runs whose timelines
were kept the slots over time, and the lengths. Slots, bins and points are bounded, so a long
experiment gives a file of the same size.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from libra_cli import __version__
from libra_cli.bench.report import sheets, terminal
from libra_cli.report.html.charts import TimelineRow, timeline
from libra_cli.report.html.drawing import BOTTOM, RIGHT, TOP, Drawing, label_width
from libra_cli.report.html.run_report import Chart
from libra_cli.report.html.scales import Scale, powers, round_numbers

if TYPE_CHECKING:
    from libra_cli.bench.results import (
        Comparison,
        ComparisonSummary,
        ExperimentResult,
        Interval,
        Regret,
        Timeline,
    )
_TEMPLATE = "bench.html.j2"
_BINS = 240
_MAX_SLOTS = 48
_MAX_TIMELINES = 6
_MAX_SMALL = 8
_LENGTH_POINTS = 200
COLOURS = {
    "serving": "a",
    "training": "b",
    "draining": "warn",
    "starting": "warn",
    "syncing": "warn",
}
"""Page variables of a slot's states; ``idle`` is left blank, what else there is drawn grey."""
_METRIC_UNITS = {"makespan_s": "seconds", "throughput_tok_s": "generated tokens per second"}


def bench_page(
    results: Sequence[ExperimentResult],
    *,
    about: str,
    command: str,
    warnings: Sequence[str] = (),
) -> str:
    """The page as text. ``about`` stands under the title, ``warnings`` above all else.

    Raises:
        StateError: this installation lacks the template.
    """
    timelines = [timeline for result in results for timeline in result.timelines]
    return _rendered(
        about=about,
        command=command,
        warnings=warnings,
        tiles=_tiles(results),
        sections=[_section(result) for result in results],
        slots=_slot_charts(timelines),
        charts=_lengths(timelines),
    )


def sheets_page(title: str, found: Sequence[terminal.Sheet], *, about: str, command: str) -> str:
    """A page of tables without drawings, as text; raises as ``bench_page``."""
    section = {"title": title, "notes": (), "sheets": found, "comparisons": ()}
    return _rendered(
        about=about,
        command=command,
        warnings=(),
        tiles=(),
        sections=[section],
        slots=(),
        charts=(),
    )


def _rendered(**values: object) -> str:
    import jinja2  # here, not above: a command that writes no report need not wait for it

    from libra_cli.report.html.templates import template

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string(template(_TEMPLATE))
    return page.render(**values, version=__version__)


# -- numbers ---------------------------------------------------------------------------------------


def _tiles(results: Sequence[ExperimentResult]) -> list[tuple[str, str, str]]:
    """(name, value, what it says): of each first comparison that has libra in it."""
    tiles: list[tuple[str, str, str]] = []
    for result in results:
        found = next(((c, s) for c in result.comparisons if (s := _ours(c))), None)
        if found is None:
            continue
        comparison, summary = found
        what = "makespan" if summary.judged_by == "makespan_s" else "throughput"
        if summary.baseline is not None:
            name = terminal.name_of(comparison, summary.baseline)
            value = terminal.change(summary.baseline)
            tiles.append((f"{what} against {name}", value, terminal.subject(comparison)))
        if summary.rival is not None and summary.rival != summary.baseline:
            name = terminal.name_of(comparison, summary.rival)
            doubt = "" if summary.significant else "not significant"
            value = terminal.change(summary.rival)
            tiles.append((f"{what} against {name}", value, doubt or "the best other, significant"))
        if summary.share_of_bound is not None:
            value = terminal.share(summary.share_of_bound, summary.share_ci95)
            tiles.append(("of the bound", value, "the least makespan there can be, over its own"))
    return tiles


def _ours(comparison: Comparison) -> ComparisonSummary | None:
    pairs = zip(comparison.names, comparison.summaries, strict=True)
    return next((summary for name, summary in pairs if name == terminal.OURS), None)


def _section(result: ExperimentResult) -> dict[str, object]:
    return {
        "title": result.title,
        "notes": result.notes,
        "sheets": _regret_sheets(result.regrets),
        "comparisons": [
            {
                "subject": terminal.subject(comparison),
                "chart": _contenders(comparison),
                "rows": _table(comparison),
                "last": "of the bound" if terminal.has_share(comparison) else "against",
                "legend": terminal.legend(comparison),
                "verdicts": terminal.verdicts(comparison),
            }
            for comparison in result.comparisons
        ],
    }


def _regret_sheets(found: Sequence[Regret]) -> list[terminal.Sheet]:
    return [sheets.regret_sheet(found), sheets.causes_sheet(found)] if found else []


def _table(comparison: Comparison) -> list[dict[str, object]]:
    by_share = terminal.has_share(comparison)
    return [
        {
            "name": name,
            "best": summary.best,
            "mark": terminal.mark(summary),
            "cells": terminal.cells(summary, by_share),
        }
        for name, summary in zip(comparison.names, comparison.summaries, strict=True)
    ]


# -- contenders ------------------------------------------------------------------------------------


def _contenders(comparison: Comparison) -> Chart:
    """A dot a contender, with the interval of its difference to the baseline around it."""
    summaries, metric = comparison.summaries, comparison.summaries[0].judged_by
    base = next((s for s in summaries if s.baseline is None), summaries[0])
    base_name = comparison.names[summaries.index(base)]
    spans = [_paired(summary, base.mean[metric]) for summary in summaries]
    colours = {_dot_colour(comparison, summary) for summary in summaries}
    meanings = (
        ("a", "dot", "libra"),
        ("good", "dot", "the future known"),
        ("ink", "dot", "others"),
    )
    keys = [key for key in meanings if key[0] in colours] + [("muted", "dash", base_name)]
    title = "Makespan" if metric == "makespan_s" else "Throughput"
    unit = _METRIC_UNITS[metric]
    if any(spans):
        unit += f"; bars: 95 % interval of the difference to {base_name}, seed by seed"
    svg = _dots_and_spans(comparison, base.mean[metric], spans)
    return Chart(title, unit, svg, keys, wide=True)


def _dots_and_spans(comparison: Comparison, zero: float, spans: Sequence[Interval | None]) -> str:
    """Draw a row for each contender, and the baseline's mean ``zero`` through all of them."""
    summaries = comparison.summaries
    means = [summary.mean[summary.judged_by] for summary in summaries]
    low, high = _reach(means, spans)
    height = 22 * len(summaries) + 36
    drawing = Drawing(
        Scale(low, high, label_width(comparison.names), 1080 - RIGHT),
        Scale(-0.6, len(summaries) - 0.4, height - BOTTOM, TOP),
        width=1080,
        height=height,
    )
    ticks = round_numbers(low, high, count=10)
    for tick in ticks:
        drawing.upright(tick, "grid")
    drawing.x_axis(ticks, [terminal.amount(tick) for tick in ticks])
    places = range(len(summaries) - 1, -1, -1)
    drawing.y_axis(places, comparison.names)
    drawing.upright(zero, "muted", width=1.0, dashes="4 3")
    for place, summary, mean, span in zip(places, summaries, means, spans, strict=True):
        colour = _dot_colour(comparison, summary)
        if span is not None:
            drawing.line(span, (place, place), colour, width=2.2, opacity=0.6)
        drawing.dots([mean], [place], colour, diameter=6.5, opacity=1.0)
    return drawing.svg()


def _reach(means: Sequence[float], spans: Iterable[Interval | None]) -> tuple[float, float]:
    """Return the ends of an axis that shows all means and spans with room beside them."""
    values = [*means, *(end for span in spans if span for end in span)]
    room = (max(values) - min(values)) / 20 or abs(values[0]) / 20 or 1.0
    return min(values) - room, max(values) + room


def _paired(summary: ComparisonSummary, zero: float) -> Interval | None:
    """Return where the contender's mean may lie if the baseline's
    is ``zero``; None without a baseline.
    """
    if summary.baseline is None or summary.baseline.ci95 is None:
        return None
    low, high = summary.baseline.ci95
    return zero * (1 + low), zero * (1 + high)


def _dot_colour(comparison: Comparison, summary: ComparisonSummary) -> str:
    if summary is _ours(comparison):
        return "a"
    return "ink" if summary.causal else "good"


# -- slots over time -------------------------------------------------------------------------------


def _slot_charts(timelines: Sequence[Timeline]) -> list[Chart]:
    """The first few, those of one trace on the same scale."""
    shown = [run for run in timelines if run.spans][:_MAX_TIMELINES]
    keys = (
        ("a", "box", "serving"),
        ("b", "box", "training"),
        ("warn", "box", "draining, starting, syncing"),
    )
    charts = []
    for run in shown:
        seconds = max(
            span[3] for other in shown if other.trace == run.trace for span in other.spans
        )
        states = {state for _, state, _, _ in run.spans}
        rows, left_out = _slot_rows(run, seconds)
        unit = "minutes:seconds; blank is idle"
        if left_out:
            unit += f"; {len(rows)} of {len(rows) + left_out} slots"
        svg = timeline(
            rows,
            seconds=seconds,
            row_height=max(9, min(26, 420 // max(1, len(rows)))),
            colours={state: COLOURS.get(state, "muted") for state in states - {"idle"}},
            opacity=0.6,
        )
        charts.append(Chart(f"Slots: {_who(run)}", unit, svg, keys, wide=True))
    return charts


def _slot_rows(run: Timeline, seconds: float) -> tuple[list[TimelineRow], int]:
    """The rows to draw, evenly spread over the slots, and how many were left out."""
    slots: dict[str, list[tuple[str, float, float]]] = {}
    for slot, state, start, end in run.spans:
        slots.setdefault(slot, []).append((state, start, end))
    names = sorted(slots, key=_natural)
    every = math.ceil(len(names) / _MAX_SLOTS)
    chosen = names[::every] if names else []
    rows = [TimelineRow(name, _binned(slots[name], seconds)) for name in chosen]
    return rows, len(names) - len(chosen)


def _binned(
    spans: Iterable[tuple[str, float, float]], seconds: float
) -> list[tuple[float, float, str]]:
    """The state that fills most of each bin, neighbours of one state joined."""
    width = seconds / _BINS
    shares: list[dict[str, float]] = [{} for _ in range(_BINS)]
    for state, start, end in spans:
        for at in range(max(0, int(start / width)), min(_BINS, math.ceil(end / width))):
            inside = min(end, (at + 1) * width) - max(start, at * width)
            shares[at][state] = shares[at].get(state, 0.0) + max(0.0, inside)
    joined: list[tuple[float, float, str]] = []
    for at, share in enumerate(shares):
        state = _state_of_bin(share, width)
        if joined and joined[-1][2] == state:
            joined[-1] = (joined[-1][0], (at + 1) * width, state)
        else:
            joined.append((at * width, (at + 1) * width, state))
    return joined


def _state_of_bin(shares: dict[str, float], width: float) -> str:
    """The state that fills most of a bin; time of which nothing is known is idle."""
    unknown = max(0.0, width - sum(shares.values()))
    whole = {**shares, "idle": shares.get("idle", 0.0) + unknown}
    return max(whole, key=lambda state: whole[state])


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``a/10`` behind ``a/9``."""
    import re

    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _who(run: Timeline) -> str:
    parts = (run.policy, run.planner, run.trace, run.variant, f"seed {run.seed}")
    return ", ".join(part for part in parts if part)


# -- lengths --------------------------------------------------------------------------------------


def _lengths(timelines: Sequence[Timeline]) -> list[Chart]:
    """Return a chart of lengths for each trace and variant: all
    contenders of a seed play the same trajectories.
    """
    firsts = {(s.trace, s.variant): s for s in reversed(timelines) if len(s.lengths) > 1}
    charts = []
    for run in list(reversed(firsts.values()))[:_MAX_SMALL]:
        lengths = sorted(run.lengths)
        mean = terminal.amount(round(sum(lengths) / len(lengths)))
        p99 = terminal.amount(lengths[math.ceil(0.99 * len(lengths)) - 1])
        unit = f"{run.trace}: generated tokens, mean {mean}, P99 {p99}"
        keys = (
            ("a", "line", "trajectories longer than this"),
            ("b", "line", "tokens in them"),
        )
        charts.append(Chart("Lengths", unit, _survival_curves(lengths), keys))
    return charts


def _survival_curves(lengths: Sequence[int]) -> str:
    """Draw the shares of trajectories and tokens over the length; ``lengths`` ascend."""
    xs, trajectories, tokens = _survival(lengths)
    drawing = Drawing(
        Scale(xs[0], xs[-1], 46, 520 - RIGHT, log=True),
        Scale(0, 1.02, 230 - BOTTOM, TOP),
        width=520,
        height=230,
    )
    shares = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    for share in shares:
        drawing.level(share, "grid")
    drawing.y_axis(shares, [f"{share:.0%}" for share in shares])
    ticks = powers(xs[0], xs[-1])
    drawing.x_axis(ticks, [terminal.amount(tick) for tick in ticks])
    drawing.line(xs, trajectories, "a")
    drawing.line(xs, tokens, "b")
    return drawing.svg()


def _survival(lengths: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Lengths evenly spread on a logarithmic axis; the share of trajectories, and of all tokens,
    in trajectories longer than each. ``lengths`` ascend."""
    low, high = math.log(max(1, lengths[0])), math.log(max(2, lengths[-1]))
    xs = [math.exp(low + (high - low) * at / _LENGTH_POINTS) for at in range(_LENGTH_POINTS + 1)]
    below = [0]
    for length in lengths:
        below.append(below[-1] + length)
    trajectories, tokens = [], []
    for x in xs:
        at = bisect.bisect_right(lengths, x)
        trajectories.append(1 - at / len(lengths))
        tokens.append(1 - below[at] / max(1, below[-1]))
    return xs, trajectories, tokens
