"""A drawing with two axes as SVG text, in the colours of the page around it.

A colour is the name of a CSS variable of the page, so that a drawing follows the reader's light or
dark setting. Text takes the page's font. Coordinates are rounded to a tenth of a pixel, which keeps
the text short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from libra_cli.report.html.scales import Scale

TOP, BOTTOM, RIGHT = 8, 24, 10
"""Margins in pixels; the lower one has the numbers of the axis."""
_FONT_SIZE = 11
_CHARACTER = 7
"""Pixels that a character of a label takes at most in the common fonts."""


def label_width(words: Iterable[str]) -> int:
    """Return the pixels beside an axis that its labels take at most."""
    return 12 + _CHARACTER * max(map(len, words), default=0)


class Drawing:
    """Collects the shapes of one drawing; values are put where the scales ``x`` and ``y`` say.

    Sizes are in pixels, and those of dashes are lengths of a dash and of a gap.
    """

    def __init__(self, x: Scale, y: Scale, *, width: int, height: int) -> None:
        self.x, self.y = x, y
        self._width, self._height = width, height
        self._shapes: list[str] = []

    def svg(self) -> str:
        """Return the drawing; it takes the width that the page gives it."""
        shapes = "\n".join(self._shapes)
        return (
            f'<svg viewBox="0 0 {self._width} {self._height}" role="img"'
            f' font-size="{_FONT_SIZE}" fill="none">\n{shapes}\n</svg>'
        )

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        *,
        width: float = 2.0,
        dashes: str = "",
        opacity: float = 1.0,
    ) -> None:
        """Draw straight lines from point to point; without points, nothing is drawn."""
        points = [self._point(x, y) for x, y in zip(xs, ys, strict=True)]
        if points:
            dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
            self._stroke("M" + "L".join(points), colour, width, f"{dashed}{_opacity(opacity)}")

    def dots(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        *,
        diameter: float = 5.0,
        opacity: float = 0.4,
    ) -> None:
        """Draw points as one path of lines without a length and with round ends.

        Single shapes would take six times the text, and many in one place would add up to a dark
        blot.
        """
        path = "".join(f"M{self._point(x, y)}h0" for x, y in zip(xs, ys, strict=True))
        if path:
            self._stroke(path, colour, diameter, f' stroke-linecap="round"{_opacity(opacity)}')

    def boxes(
        self,
        corners: Iterable[tuple[float, float, float, float]],
        colour: str,
        *,
        opacity: float = 1.0,
    ) -> None:
        """Fill rectangles, each given as its left, bottom, right and top."""
        path = "".join(
            f"M{self._point(left, bottom)}H{_short(self.x(right))}"
            f"V{_short(self.y(top))}H{_short(self.x(left))}z"
            for left, bottom, right, top in corners
        )
        self._fill(path, colour, opacity)

    def columns(
        self,
        edges: Sequence[float],
        bottom: float,
        tops: Sequence[float],
        colour: str,
        *,
        opacity: float = 1.0,
    ) -> None:
        """Fill columns side by side from ``bottom`` to their tops; ``edges`` has one more."""
        path, before = f"M{self._point(edges[0], bottom)}", bottom
        for left, top in zip(edges, tops, strict=False):
            if top != before:
                path += f"H{_short(self.x(left))}V{_short(self.y(top))}"
            before = top
        path += f"H{_short(self.x(edges[-1]))}V{_short(self.y(bottom))}z"
        self._fill(path, colour, opacity)

    def level(self, y: float, colour: str, *, width: float = 0.8, dashes: str = "") -> None:
        """Draw a horizontal line at ``y`` from the left edge to the right one."""
        self.line((self.x.low, self.x.high), (y, y), colour, width=width, dashes=dashes)

    def upright(self, x: float, colour: str, *, width: float = 0.8, dashes: str = "") -> None:
        """Draw a line from the bottom of the drawing to its top."""
        self.line((x, x), (self.y.low, self.y.high), colour, width=width, dashes=dashes)

    def word(self, x: float, word: str, *, colour: str = "ink") -> None:
        """Write above the top of the drawing, centred on ``x``."""
        self._text(self._centred(x, word), self.y.end - 4, word, "middle", colour)

    def x_axis(self, ticks: Sequence[float], words: Sequence[str]) -> None:
        """Draw a line under the drawing with ticks and their labels."""
        self.level(self.y.low, "grid")
        bottom = self.y.begin
        path = "".join(f"M{_short(self.x(tick))} {_short(bottom)}v4" for tick in ticks)
        self._stroke(path, "grid", 0.8)
        for tick, word in zip(ticks, words, strict=True):
            self._text(self._centred(tick, word), bottom + 16, word, "middle")

    def y_axis(self, places: Sequence[float], words: Sequence[str]) -> None:
        """Write the words left of the drawing, each at the height of its place."""
        for place, word in zip(places, words, strict=True):
            self._text(self.x.begin - 7, self.y(place) + 4, word, "end")

    def _centred(self, x: float, word: str) -> float:
        """Return the pixel of ``x``, or the nearest at which the word is not cut off."""
        return min(self.x(x), self._width - _CHARACTER * len(word) / 2)

    def _point(self, x: float, y: float) -> str:
        return f"{_short(self.x(x))} {_short(self.y(y))}"

    def _stroke(self, path: str, colour: str, width: float, more: str = "") -> None:
        style = f'stroke="var(--{colour})" stroke-width="{width:g}" stroke-linejoin="round"'
        self._shapes.append(f'<path d="{path}" {style}{more}/>')

    def _fill(self, path: str, colour: str, opacity: float) -> None:
        self._shapes.append(f'<path d="{path}" fill="var(--{colour})"{_opacity(opacity)}/>')

    def _text(self, x: float, y: float, word: str, anchor: str, colour: str = "muted") -> None:
        place = f'x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}"'
        self._shapes.append(f'<text {place} fill="var(--{colour})">{escape(word)}</text>')


def _opacity(opacity: float) -> str:
    return "" if opacity == 1 else f' opacity="{opacity:g}"'


def _short(pixels: float) -> str:
    return f"{pixels:.1f}".removesuffix(".0")
