"""Small plots made of characters, for a terminal.

A cell of a ``Plot`` is a braille character, so a plot of 60 x 10 cells has 120 x 40 dots. Raw
values are dim points, the smoothed line lies over them. ``Portable`` turns all of it, and anything
else that is drawn with characters beyond ASCII, into ASCII where the terminal knows no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MAX_WIDTH = 100
_LEAST_SPAN = 0.25
"""A sparkline's height stands for at least this share of the value: noise must look like noise."""
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)

_ASCII: dict[int, str] = {
    **{_BRAILLE + dots: "*" for dots in range(1, 256)},
    _BRAILLE: " ",
    **{ord(block): digit for block, digit in zip(BLOCKS, "_..--==#", strict=True)},
    **{ord(a): b for a, b in zip("━█░│┤└─┬·→✓✗…–±≈≤≥", "=#.||`-+->+x.-~=<>", strict=True)},
}


class Portable:
    """``renderable``, in ASCII where the terminal's encoding has nothing better."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            if options.ascii_only and not segment.control:
                text = segment.text.translate(_ASCII).encode("ascii", "replace").decode()
                yield Segment(text, segment.style)
            else:
                yield segment


class Plot:
    """Values over steps 1, 2, ...: raw points and a line, as wide as the terminal allows."""

    def __init__(self, points: Sequence[float], line: Sequence[float], *, height: int = 10) -> None:
        self._points = points
        self._line = line
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        finite = [value for value in (*self._points, *self._line) if math.isfinite(value)]
        if len(self._points) < 2 or not finite:
            yield Text("not enough steps for a plot", style="dim")
            return
        low, high, ticks = _axis(min(finite), max(finite))
        labels = _labels(ticks, low, high, self._height)
        margin = max(map(len, labels.values())) + 1
        width = min(options.max_width, _MAX_WIDTH) - margin - 1
        raw = _rasterise(self._points, low, high, width, self._height, joined=False)
        line = _rasterise(self._line, low, high, width, self._height, joined=True)
        for row in range(self._height):
            text = Text(labels.get(row, "").rjust(margin), style="dim", no_wrap=True)
            text.append("┤" if row in labels else "│")
            for raw_dots, line_dots in zip(raw[row], line[row], strict=True):
                style = "bold cyan" if line_dots else ""
                text.append(chr(_BRAILLE + (line_dots or raw_dots)), style=style)
            yield text
        yield from _step_axis(len(self._points), margin, width)


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """The newest ``width`` values as blocks, from the least to the greatest of them."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = max(high - low, _LEAST_SPAN * abs(high)) or 1.0
    low -= (span - (high - low)) / 2
    return "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in shown)


def bar(share: float, width: int) -> str:
    """A share of 0 to 1 as a bar."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Limits a little outside the data, and the round ticks between them."""
    span = (high - low) or abs(high) or 1.0
    low, high = low - span * 0.04, high + span * 0.04
    magnitude = 10.0 ** math.floor(math.log10(span / 5))
    step = next(nice * magnitude for nice in _NICE if nice * magnitude >= span / 5)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return low, high, ticks


def _labels(ticks: Sequence[float], low: float, high: float, height: int) -> dict[int, str]:
    rows = {round((high - tick) / (high - low) * (height - 1)): tick for tick in ticks}
    return {row: f"{tick:.6g}" for row, tick in rows.items()}


def _rasterise(
    values: Sequence[float], low: float, high: float, width: int, height: int, *, joined: bool
) -> list[list[int]]:
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for index, value in enumerate(values):
        if not math.isfinite(value):
            before = None
            continue
        x = round(index / max(1, len(values) - 1) * (width * 2 - 1))
        y = round((high - value) / (high - low) * (height * 4 - 1))
        for dot_x, dot_y in _segment(before, (x, y)) if joined and before else [(x, y)]:
            cells[dot_y // 4][dot_x // 2] |= _DOTS[dot_y % 4][dot_x % 2]
        before = (x, y)
    return cells


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Every dot on the straight line between two dots."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * at / length),
            round(start[1] + (end[1] - start[1]) * at / length),
        )
        for at in range(length + 1)
    ]


def _step_axis(count: int, margin: int, width: int) -> RenderResult:
    marks = sorted({1, *(round(count * part / 4) for part in range(1, 5))} - {0})
    axis, labels = ["─"] * width, [" "] * width
    for mark in marks:
        column = round((mark - 1) / max(1, count - 1) * (width - 1))
        axis[column] = "┬"
        start = min(max(0, column - len(str(mark)) // 2), width - len(str(mark)))
        labels[start : start + len(str(mark))] = str(mark)
    yield Text(" " * margin + "└" + "".join(axis), style="dim", no_wrap=True)
    yield Text(" " * (margin + 1) + "".join(labels), style="dim", no_wrap=True)
