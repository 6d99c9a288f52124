"""A drawing shows every value inside its frame, and no label is cut off or touches another."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.report.html.charts import Band, Series, TimelineRow, over_steps, timeline

_CHARACTER, _LINE = 6.5, 9.0
"""Pixels of a character of the axis in a common font, and of the height of a line of text."""
_ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}
values = st.lists(st.floats(-1e9, 1e9) | st.just(math.nan), min_size=1, max_size=30)


@dataclass(frozen=True)
class Box:
    """Where a label is, in pixels."""

    left: float
    top: float
    right: float
    bottom: float
    word: str

    def touches(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def drawn(svg: str) -> tuple[ElementTree.Element, float, float]:
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    return root, width, height


def labels(svg: str) -> list[Box]:
    root, _, _ = drawn(svg)
    boxes = []
    for text in root.iter("text"):
        word, x, y = text.text or "", float(text.attrib["x"]), float(text.attrib["y"])
        width = _CHARACTER * len(word)
        left = x - _ANCHORS[text.attrib["text-anchor"]] * width
        boxes.append(Box(left, y - _LINE, left + width, y, word))
    return boxes


def assert_legible(svg: str) -> None:
    root, width, height = drawn(svg)
    boxes = labels(svg)
    for box in boxes:
        assert box.left >= 0, box
        assert box.right <= width, box
        assert box.top >= 0, box
        assert box.bottom <= height, box
    for one, other in itertools.combinations(boxes, 2):
        assert not one.touches(other), (one, other)
    for path in root.iter("path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


@given(values, st.integers(0, 10**6), st.booleans())
def test_any_values_are_inside_the_frame(ys: list[float], first: int, log: bool) -> None:
    xs = [float(first + at) for at in range(len(ys))]
    series = [Series(xs, ys, "a", kind) for kind in ("line", "points", "dashes")]
    assert_legible(over_steps(series, log=log, limit=0.5, floor=None if log else 1.0))


def test_every_value_is_a_dot_at_its_place() -> None:
    svg = over_steps([Series([0.0, 1.0, 2.0], [0.0, 5.0, 10.0], "a", "points")])
    (path,) = (path for path in drawn(svg)[0].iter("path") if "linecap" in str(path.attrib))
    (x0, y0), (x1, y1), (x2, y2) = (
        (float(x), float(y)) for x, y in re.findall(r"M(\S+) (\S+?)h0", path.attrib["d"])
    )
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    ticks = {box.word: (box.top + box.bottom) / 2 for box in labels(svg) if box.right < 46}
    assert y0 == pytest.approx(ticks["0"], abs=1)
    assert y2 == pytest.approx(ticks["10"], abs=1)


def test_a_band_lies_between_its_ends_and_under_the_curves() -> None:
    svg = over_steps(
        [Series([1.0, 9.0], [4.0, 4.0], "a")], bands=[Band(2, 5, low=3, middle=4, high=6)], floor=1
    )
    assert svg.count('opacity="0.22"') == 1
    assert svg.index("var(--b)") < svg.index("var(--a)")


@given(
    st.integers(1, 60),
    st.sampled_from([9, 16, 34]),
    st.floats(0.1, 1e7),
    st.sampled_from(["a/0", "node-17.cluster.example.com/", "<&>"]),
)
def test_any_timeline_is_legible(count: int, row_height: int, seconds: float, name: str) -> None:
    rows = [
        TimelineRow(
            f"{name}{at}", [(0.0, seconds, "serving")], (0.0, seconds / 2, seconds), (0.3, 1.0)
        )
        for at in range(count)
    ]
    marks = [(seconds * at / 40, str(at)) for at in range(40)]
    svg = timeline(
        rows, seconds=seconds, colours={"serving": "serving"}, row_height=row_height, marks=marks
    )
    assert_legible(svg)


def test_a_row_shows_how_busy_it_was() -> None:
    row = TimelineRow("a/0", [(0.0, 4.0, "serving")], (0.0, 1.0, 2.0, 4.0), (0.0, 1.0, 0.5))
    svg = timeline([row], seconds=4.0, colours={"serving": "serving"}, band=0.4)
    path = next(p.attrib["d"] for p in drawn(svg)[0].iter("path") if "0.6" in str(p.attrib))
    levels = [float(y) for y in re.findall(r"V([\d.]+)", path)]
    low, full, half = float(path[1:].split("H")[0].split()[1]), levels[0], levels[1]
    assert full < half < low
    assert half - full == pytest.approx(low - half, abs=0.2)
    assert levels[2] == low


def test_rows_of_a_few_pixels_name_every_second_slot() -> None:
    rows = [TimelineRow(f"a/{at}", []) for at in range(10)]
    names = [box.word for box in labels(timeline(rows, seconds=9, colours={}, row_height=9))]
    assert names[:5] == ["a/0", "a/2", "a/4", "a/6", "a/8"]


def test_a_mark_is_named_unless_its_name_would_touch_another() -> None:
    rows, marks = [TimelineRow("a/0", [])], [(100.0, "2"), (101.0, "3"), (900.0, "4")]
    svg = timeline(rows, seconds=1000, colours={}, marks=marks)
    assert svg.count("stroke-dasharray") == 3
    assert [box.word for box in labels(svg) if len(box.word) == 1] == ["2", "4"]
