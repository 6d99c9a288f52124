"""Pictures that stand alone: the report's drawings in one SVG, with the report's colours."""

from __future__ import annotations

import re
from collections.abc import Sequence

from libra_cli.report.html.templates import template

HEADING = 22
"""Pixels of a line of words above a drawing."""


def stacked(parts: Sequence[tuple[str, str]], *, width: int, shown: int = 0) -> str:
    """Return one SVG of a heading and a drawing each, below one another; either may be empty.

    Headings are SVG text, which may hold ``tspan``. ``width`` is in pixels of the drawings;
    ``shown`` is that of the picture where there is room for it, and 0 leaves it to the page. A
    reader whose browser asks for dark colours gets those, on a ground of their own.
    """
    both = r"^:root \{.*?^\}\n@media \(prefers-color-scheme: dark\) \{.*?^\}"
    colours = re.search(both, template("report.html.j2"), re.DOTALL | re.MULTILINE)
    assert colours is not None
    shapes, top = [], 0
    for words, svg in parts:
        if words:
            shapes.append(f'<text x="12" y="{top + 16}" fill="var(--ink)">{words}</text>')
            top += HEADING
        if svg:
            box = re.match(r'<svg viewBox="0 0 (\d+) (\d+)"', svg)
            assert box is not None
            place = f'<svg y="{top}" width="{box[1]}" height="{box[2]}"'
            shapes.append(svg.replace("<svg", place, 1))
            top += int(box[2])
    size = f' width="{shown}" height="{round(top * shown / width)}"' if shown else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}"{size}'
        f' font-family="sans-serif" font-size="13">\n<style>{colours[0]}</style>\n'
        f'<rect width="{width}" height="{top}" fill="var(--card)"/>\n'
        + "\n".join(shapes)
        + "</svg>\n"
    )
