"""Draws the charts of a report as SVG text that follows the page's light or dark colours.

Importing this module imports matplotlib, which takes half a second, so reports import it when they
write. Charts are drawn in placeholder colours that no design would use; in the SVG these become CSS
variables of the page. Text stays text and takes the page's font. The number of drawn points is
bounded, so a long run gives a file of the same size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLOURS = {
    "ink": "#010203",
    "muted": "#020304",
    "grid": "#030405",
    "a": "#040506",
    "b": "#050607",
    "good": "#060708",
    "warn": "#070809",
    "bad": "#08090a",
    "serving": "#090a0b",
    "training": "#0a0b0c",
    "gradient": "#0b0c0d",
    "draining": "#0c0d0e",
    "stopping": "#0d0e0f",
    "starting": "#0e0f10",
    "syncing": "#0f1011",
    "idle": "#101112",
    "failed": "#111213",
}
"""The CSS variables of a page, each with its placeholder colour."""
_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "libra",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "text.color": COLOURS["muted"],
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    "ytick.minor.left": False,
    "axes.axisbelow": True,
    "path.simplify": True,
}
_DPI = 72
_STEPS = [1, 2, 5, 10]
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_POINTS = 250
_TOP, _BOTTOM = 8, 24
"""Margins in pixels; the lower one has the axis' numbers."""
_ROW_HEIGHT = 34
_ROW_TOP = 0.8
"""The share of a row's height that is drawn on; the rest separates it from the row above."""
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
    """One slot's states as (start, end, state) in seconds, and how busy it was, from 0 to 1."""

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
    name: str,
    series: Sequence[Series],
    *,
    bands: Sequence[Band] = (),
    width: int = 520,
    height: int = 210,
    log: bool = False,
    limit: float | None = None,
    floor: float | None = None,
) -> str:
    """Draw curves over steps; ``name`` is unique on the page, width and height are in pixels.

    ``limit`` draws a horizontal line; the axis begins at 0 and reaches ``floor`` at least.
    ``bands`` lie below the curves, in the page variable ``b``.
    """

    def paint(axes: Axes) -> None:
        for band in bands:
            _draw_band(axes, band)
        for one in series:
            _draw(axes, one)
        if limit is not None:
            axes.axhline(limit, color=COLOURS["bad"], linewidth=1.1, dashes=(5, 4))
        if log:
            _log_axis(axes)
        else:
            _linear_axis(axes, floor)
        _step_axis(axes, series)

    return drawing(name, paint, width=width, height=height)


def timeline(
    name: str,
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
    """Draw a row for each slot over a run of ``seconds``; ``name`` is unique on the page.

    ``colours`` maps the states that are shaded to page variables. The shade takes the share
    ``band`` of a row, and how busy the slot was is drawn above it. ``marks`` are pairs of seconds
    and a name, drawn as a line through all rows.
    """
    left, top = 110, _MARK_TOP if marks else _TOP

    def paint(axes: Axes) -> None:
        _shade(axes, rows, colours, opacity=opacity, band=band)
        for index, row in enumerate(rows):
            _draw_row(axes, row, bottom=len(rows) - 1 - index, base=band)
        axes.set_xlim(0, max(seconds, 1.0))
        axes.set_ylim(-0.08, len(rows))
        axes.set_yticks([len(rows) - 1 - index + 0.4 for index in range(len(rows))])
        axes.set_yticklabels([row.name for row in rows])
        axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 1.5, 2, 3, 5, 6, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))
        _draw_marks(axes, marks, top=len(rows), apart=_MARK_APART * seconds / (width - left))

    height = row_height * len(rows) + _BOTTOM + top
    return drawing(name, paint, width=width, height=height, left=left, top=top)


def drawing(
    name: str,
    paint: Callable[[Axes], None],
    *,
    width: int,
    height: int,
    left: int = 46,
    top: int = _TOP,
) -> str:
    """Let ``paint`` draw on axes, and return the SVG in the colours of the page.

    All sizes are in pixels; ``left`` and ``top`` are margins for labels. ``name`` is unique on the
    page.
    """
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
        axes = figure.add_axes(_box(width, height, left=left, top=top))
        paint(axes)
        return _svg(name, figure)


def thinned(values: Sequence[float]) -> Iterator[int]:
    """Return at most ``_MAX_POINTS`` indices, evenly spread, with the first and the last."""
    count = min(len(values), _MAX_POINTS)
    if count < 2:
        return iter(range(count))
    return iter(round(at * (len(values) - 1) / (count - 1)) for at in range(count))


def _box(width: int, height: int, *, left: int, top: int) -> tuple[float, float, float, float]:
    """The axes in figure coordinates, with margins in pixels."""
    right = 10
    return (
        left / width,
        _BOTTOM / height,
        (width - left - right) / width,
        (height - _BOTTOM - top) / height,
    )


def _draw(axes: Axes, series: Series) -> None:
    indices = [index for index in thinned(series.xs) if math.isfinite(series.ys[index])]
    xs, ys = [series.xs[index] for index in indices], [series.ys[index] for index in indices]
    colour = COLOURS[series.colour]
    if series.kind == "points":
        _dots(axes, xs, ys, colour)
    elif series.kind == "dashes":
        axes.plot(xs, ys, color=colour, linewidth=1.3, dashes=(2, 1.6))
    else:
        axes.plot(xs, ys, color=colour, linewidth=2.0, solid_joinstyle="round")


def _draw_band(axes: Axes, band: Band) -> None:
    xs, colour = (band.begin, band.end), COLOURS["b"]
    axes.fill_between(xs, band.low, band.high, color=colour, alpha=0.22, linewidth=0)
    axes.plot(xs, (band.middle, band.middle), color=colour, linewidth=1.6)


def _dots(axes: Axes, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
    """Draw points as one path of zero-length lines with round ends.

    Markers would take six times the text, and many in one place would add up to a dark blot.
    """
    doubled_xs = [value for x in xs for value in (x, x, math.nan)]
    doubled_ys = [value for y in ys for value in (y, y, math.nan)]
    (line,) = axes.plot(
        doubled_xs, doubled_ys, color=colour, alpha=0.4, linewidth=5, solid_capstyle="round"
    )
    line.get_path().should_simplify = False


def _linear_axis(axes: Axes, floor: float | None) -> None:
    if floor is not None:
        axes.set_ylim(0, max(floor, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(axis="y")


def _log_axis(axes: Axes) -> None:
    low, high = axes.dataLim.y0, axes.dataLim.y1
    axes.set_yscale("log")
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)) * 1.7)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.grid(axis="y")


def _power(value: float) -> str:
    return "10" + str(round(math.log10(value))).translate(_SUPERSCRIPTS)


def _step_axis(axes: Axes, series: Sequence[Series]) -> None:
    xs = [x for one in series for x in one.xs]
    if xs:
        margin = max(0.5, (max(xs) - min(xs)) * 0.015)
        axes.set_xlim(min(xs) - margin, max(xs) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_STEPS))


def _shade(
    axes: Axes,
    rows: Sequence[TimelineRow],
    colours: Mapping[str, str],
    *,
    opacity: float,
    band: float,
) -> None:
    """Draw the states of all rows in one path per colour, a tenth of the text of single shapes."""
    corners: dict[str, list[tuple[float, float]]] = {}
    for bottom, row in enumerate(reversed(rows)):
        top = bottom + band
        for start, end, state in row.states:
            if state in colours:
                box = ((start, bottom), (end, bottom), (end, top), (start, top))
                corners.setdefault(colours[state], []).extend((*box, box[0]))
    shape = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)
    for colour, points in corners.items():
        path = Path(points, shape * (len(points) // len(shape)))
        axes.add_patch(PathPatch(path, facecolor=COLOURS[colour], alpha=opacity, lw=0))


def _draw_row(axes: Axes, row: TimelineRow, *, bottom: int, base: float) -> None:
    """Draw how busy a slot was, from the share ``base`` of the row's height upwards."""
    axes.axhline(bottom, color=COLOURS["grid"], linewidth=0.8)
    if row.times:
        low = bottom + base
        tops = [low + (_ROW_TOP - base) * share for share in row.busy]
        colour = COLOURS[row.colour]
        axes.fill_between(row.times, low, tops, step="post", color=colour, alpha=0.6, lw=0)


def _draw_marks(
    axes: Axes, marks: Sequence[tuple[float, str]], *, top: float, apart: float
) -> None:
    """Draw a line for each mark, and its name unless that would touch the name before."""
    named = -math.inf
    for at, name in marks:
        axes.axvline(at, color=COLOURS["ink"], linewidth=1.1, dashes=(4, 3))
        if at - named >= apart:
            axes.text(at, top, name, color=COLOURS["ink"], ha="center", va="bottom")
            named = at


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _svg(name: str, figure: Figure) -> str:
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', text, count=1)
    for variable, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    return re.sub(r"\s*\n\s*", "\n", _own_ids(name, _rounded(text)))


def _rounded(text: str) -> str:
    """Round coordinates to a tenth of a pixel, which shortens the text to a third."""

    def shorter(number: re.Match[str]) -> str:
        return f"{float(number[0]):.1f}".removesuffix(".0")

    def in_attribute(attribute: re.Match[str]) -> str:
        return attribute[1] + re.sub(r"-?\d+\.\d+", shorter, attribute[2])

    return re.sub(r"(\s(?:d|x|y|width|height)=)(\"[^\"]*\")", in_attribute, text)


def _own_ids(name: str, text: str) -> str:
    """Drop unused ids, and make the others unique on the page."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))

    def renamed(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
    return re.sub(r'\sid="([^"]*)"', renamed, text)
