"""The ticks of an axis are round, lie where the values do, and have labels that differ."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.report.html import scales
from libra_cli.report.html.scales import Scale

numbers = st.floats(-1e12, 1e12, allow_nan=False, allow_subnormal=False)
positive = st.floats(1e-12, 1e12, allow_nan=False)


def round_(number: float) -> bool:
    """Whether it is 1, 2 or 5 times a power of ten."""
    return f"{number:.3e}"[:5] in ("1.000", "2.000", "5.000")


@given(numbers, numbers)
def test_round_ticks_enclose_all_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = scales.enclosing(low, high)
    step = ticks[1] - ticks[0]
    assert round_(step)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low + step / 1e6
    assert ticks[-1] >= high - step / 1e6
    words = scales.decimal_words(ticks)
    assert len(set(words)) == len(words)
    assert [float(word.replace(",", "")) for word in words] == pytest.approx(ticks, rel=1e-6)


def test_the_ends_of_an_axis_are_the_nearest_ticks() -> None:
    assert scales.enclosing(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert scales.enclosing(0.51, 0.93)[0] == pytest.approx(0.5)
    assert scales.decimal_words(scales.enclosing(-0.012, 0.018)) == [
        "-0.015",
        "-0.01",
        "-0.005",
        "0",
        "0.005",
        "0.01",
        "0.015",
        "0.02",
    ]


def test_one_value_has_room_around_it() -> None:
    for value in (0.0, 3.0, -1e9):
        ticks = scales.enclosing(value, value)
        assert ticks[0] < value < ticks[-1]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_steps_are_whole_numbers(first: int, count: int) -> None:
    low, high = first - 0.5, first + count + 0.5
    ticks = scales.whole_numbers(low, high)
    assert ticks
    assert len(ticks) <= 9
    assert all(tick == round(tick) and low <= tick <= high for tick in ticks)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (4, ["0:00", "0:01", "0:02", "0:03", "0:04"]),
        (254, ["0:00", "0:30", "1:00", "1:30", "2:00", "2:30", "3:00", "3:30", "4:00"]),
        (7300, ["0:00", "15:00", "30:00", "45:00", "1:00:00"]),
        (36 * 3600, ["0:00", "6:00:00", "12:00:00", "18:00:00", "24:00:00"]),
        (90 * 86400, ["0:00", "240:00:00", "480:00:00"]),
    ],
)
def test_times_are_round_on_a_clock(seconds: float, words: list[str]) -> None:
    told = [scales.clock(time) for time in scales.clock_times(seconds)]
    assert told[: len(words)] == words
    assert len(told) <= 11


@given(positive, positive)
def test_powers_enclose_all_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = scales.enclosing_powers(low, high)
    assert all(map(round_, ticks))
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= high * (1 - 1e-6)
    inside = scales.powers(low, high)
    assert set(inside) <= set(ticks)


def test_powers_are_written_as_powers() -> None:
    assert scales.power_words([2e-5, 1.0, 1e12]) == ["2·10⁻⁵", "10⁰", "10¹²"]


@given(positive, positive, st.booleans())
def test_a_scale_reaches_from_its_first_pixel_to_its_last(
    one: float, other: float, log: bool
) -> None:
    low, high = sorted((one, one + other))
    if math.isclose(low, high):
        return
    scale = Scale(low, high, 46, 510, log)
    assert scale(low) == pytest.approx(46)
    assert scale(high) == pytest.approx(510)
    middle = math.sqrt(low * high) if log else (low + high) / 2
    assert scale(middle) == pytest.approx(278)
