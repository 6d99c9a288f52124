"""Draws the charts of a report as SVG text that follows the page's light or dark colours.

The number of drawn points is bounded, so a long run gives a file of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from libra_cli.report.html import scales
from libra_cli.report.html.drawing import BOTTOM, RIGHT, TOP, Drawing, label_width
from libra_cli.report.html.scales import Scale

_MAX_POINTS = 250
_LEFT = 46
"""The least room for the numbers of an axis, so that charts below one another are aligned."""
_ROW_HEIGHT = 34
_ROW_TOP = 0.8
"""The share of a row's height that is drawn on; the rest separates it from the row above."""
_LEAST_TEXT_HEIGHT = 13
_LONGEST_NAME = 32
_MARK_TOP = 20
_MARK_APART = 18
"""Pixels above the rows for the names of marks, and the least distance between two names."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps. ``kind`` is ``line | points | dashes``; ``colour`` a page variable."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    kind: str = "line"


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One slot's states as (start, end, state) in seconds, and how busy it was, from 0 to 1.

    ``times`` are the edges of the spans of ``busy``, hence one more.
    """

    name: str
    states: Sequence[tuple[float, float, str]]
    times: Sequence[float] = field(default_factory=tuple)
    busy: Sequence[float] = field(default_factory=tuple)
    colour: str = "a"


@dataclass(frozen=True, slots=True)
class Band:
    """What was predicted for the steps from ``begin`` to ``end``: a value and its interval."""

    begin: float
    end: float
    low: float
    middle: float
    high: float


def over_steps(
    series: Sequence[Series],
    *,
    bands: Sequence[Band] = (),
    width: int = 520,
    height: int = 210,
    log: bool = False,
    limit: float | None = None,
    floor: float | None = None,
) -> str:
    """Draw curves over steps; width and height are in pixels.

    ``limit`` draws a horizontal line; with ``floor`` the axis begins at 0 and reaches it at least.
    ``bands`` lie below the curves, in the page variable ``b``.
    """
    ticks, words = _value_axis(_values(series, bands, limit), log=log, floor=floor)
    low, high = _step_range(series)
    drawing = Drawing(
        Scale(low, high, max(_LEFT, label_width(words)), width - RIGHT),
        Scale(ticks[0], ticks[-1], height - BOTTOM, TOP, log),
        width=width,
        height=height,
    )
    for tick in ticks:
        drawing.level(tick, "grid")
    drawing.y_axis(ticks, words)
    steps = scales.whole_numbers(low, high)
    drawing.x_axis(steps, [f"{step:,.0f}" for step in steps])
    for band in bands:
        _draw_band(drawing, band)
    for one in series:
        _draw(drawing, one, log=log)
    if limit is not None:
        drawing.level(limit, "bad", width=1.1, dashes="5.5 4.4")
    return drawing.svg()


def timeline(
    rows: Sequence[TimelineRow],
    *,
    seconds: float,
    colours: Mapping[str, str],
    width: int = 1080,
    row_height: int = _ROW_HEIGHT,
    opacity: float = 0.35,
    band: float = _ROW_TOP,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw a row for each slot over a run of ``seconds``.

    ``colours`` maps the states that are shaded to page variables. The shade takes the share
    ``band`` of a row, and how busy the slot was is drawn above it. ``marks`` are pairs of seconds
    and a name, drawn as a line through all rows.
    """
    names = [_shortened(row.name) for row in rows]
    top = _MARK_TOP if marks else TOP
    height = row_height * len(rows) + BOTTOM + top
    drawing = Drawing(
        Scale(0, max(seconds, 1.0), max(_LEFT, label_width(names)), width - RIGHT),
        Scale(-0.08, len(rows), height - BOTTOM, top),
        width=width,
        height=height,
    )
    _shade(drawing, rows, colours, opacity=opacity, band=band)
    for bottom, row in enumerate(reversed(rows)):
        _draw_row(drawing, row, bottom=bottom, base=band)
    every = math.ceil(_LEAST_TEXT_HEIGHT / row_height)
    drawing.y_axis([len(rows) - 0.6 - at for at in range(0, len(rows), every)], names[::every])
    times = scales.clock_times(max(seconds, 1.0))
    drawing.x_axis(times, [scales.clock(time) for time in times])
    _draw_marks(drawing, marks)
    return drawing.svg()


def thinned(values: Sequence[float]) -> Iterator[int]:
    """Return at most ``_MAX_POINTS`` indices, evenly spread, with the first and the last."""
    count = min(len(values), _MAX_POINTS)
    if count < 2:
        return iter(range(count))
    return iter(round(at * (len(values) - 1) / (count - 1)) for at in range(count))


def _values(series: Sequence[Series], bands: Sequence[Band], limit: float | None) -> list[float]:
    """Return all that the value axis must reach."""
    values = [y for one in series for y in one.ys if math.isfinite(y)]
    values += [y for band in bands for y in (band.low, band.high)]
    return values if limit is None else [*values, limit]


def _value_axis(
    values: Sequence[float], *, log: bool, floor: float | None
) -> tuple[list[float], list[str]]:
    """Return the ticks of an axis that all values lie on, and their labels."""
    if log:
        above = [value for value in values if value > 0] or [1.0]
        ticks = scales.enclosing_powers(min(above), max(above))
        return ticks, scales.power_words(ticks)
    if floor is not None:
        values = [0.0, floor, *values]
    ticks = scales.enclosing(min(values, default=0.0), max(values, default=1.0))
    return ticks, scales.decimal_words(ticks)


def _step_range(series: Sequence[Series]) -> tuple[float, float]:
    xs = [x for one in series for x in one.xs] or [0.0]
    margin = max(0.5, (max(xs) - min(xs)) * 0.015)
    return min(xs) - margin, max(xs) + margin


def _draw(drawing: Drawing, series: Series, *, log: bool) -> None:
    shown = [at for at in thinned(series.xs) if math.isfinite(series.ys[at])]
    if log:
        shown = [at for at in shown if series.ys[at] > 0]
    xs, ys = [series.xs[at] for at in shown], [series.ys[at] for at in shown]
    if series.kind == "points":
        drawing.dots(xs, ys, series.colour)
    elif series.kind == "dashes":
        drawing.line(xs, ys, series.colour, width=1.3, dashes="2.6 2.1")
    else:
        drawing.line(xs, ys, series.colour)


def _draw_band(drawing: Drawing, band: Band) -> None:
    begin, end = max(band.begin, drawing.x.low), min(band.end, drawing.x.high)
    drawing.boxes([(begin, band.low, end, band.high)], "b", opacity=0.22)
    drawing.line((begin, end), (band.middle, band.middle), "b", width=1.6)


def _shortened(name: str) -> str:
    """Return a name, or the end of a long one, which tells slots of one host apart."""
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


def _shade(
    drawing: Drawing,
    rows: Sequence[TimelineRow],
    colours: Mapping[str, str],
    *,
    opacity: float,
    band: float,
) -> None:
    """Draw the states of all rows in one path per colour, a tenth of the text of single shapes."""
    boxes: dict[str, list[tuple[float, float, float, float]]] = {}
    for bottom, row in enumerate(reversed(rows)):
        for start, end, state in row.states:
            if state in colours:
                box = (start, bottom, end, bottom + band)
                boxes.setdefault(colours[state], []).append(box)
    for colour, corners in boxes.items():
        drawing.boxes(corners, colour, opacity=opacity)


def _draw_row(drawing: Drawing, row: TimelineRow, *, bottom: int, base: float) -> None:
    """Draw how busy a slot was, from the share ``base`` of the row's height upwards."""
    drawing.level(bottom, "grid")
    if row.busy:
        low = bottom + base
        tops = [low + (_ROW_TOP - base) * share for share in row.busy]
        drawing.columns(row.times, low, tops, row.colour, opacity=0.6)


def _draw_marks(drawing: Drawing, marks: Sequence[tuple[float, str]]) -> None:
    """Draw a line for each mark, and its name unless that would touch the name before."""
    named = -math.inf
    for at, name in marks:
        drawing.upright(at, "ink", width=1.1, dashes="4.4 3.3")
        if drawing.x(at) - named >= _MARK_APART:
            drawing.word(at, name)
            named = drawing.x(at)
