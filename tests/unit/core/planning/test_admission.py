"""Which plans are worth their moves, and for how long a plan is expected to be good."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.planning.admission import (
    FURTHEST,
    HORIZON,
    USUAL,
    Admission,
    drifted,
    expected_change,
    expected_rate,
    horizon,
)
from libra_cli.core.planning.search import Times

BEFORE = Times(rollout_s=10.0, train_s=1.0)


def test_a_plan_that_pays_is_admitted() -> None:
    assert not Admission(horizon=10).why_not(BEFORE, Times(8.0, 1.0), 19.0)


@pytest.mark.parametrize(
    ("after", "cost_s", "why"),
    [
        (Times(10.0, 1.0), 0.0, "no plan is predicted to be faster"),
        (Times(9.6, 1.0), 0.0, "a gain of 4.0% is below 5%"),
        (Times(8.0, 1.0), 20.0, "2.0 s a step over the 10 steps"),
    ],
)
def test_a_plan_that_does_not_pay_is_refused_with_numbers(
    after: Times, cost_s: float, why: str
) -> None:
    assert why in Admission(horizon=10).why_not(BEFORE, after, cost_s)


def test_a_gain_of_exactly_the_least_is_enough_and_one_that_only_pays_back_is_not() -> None:
    half = Times(5.0, 0.5)
    assert not Admission(min_gain=0.5).why_not(BEFORE, half, 0.0)
    assert Admission(min_gain=0.51).why_not(BEFORE, half, 0.0)
    gain_s = BEFORE.step_s - half.step_s
    assert "do not pay back" in Admission(horizon=8).why_not(BEFORE, half, 8 * gain_s)
    assert not Admission(horizon=8).why_not(BEFORE, half, 7.9 * gain_s)


def test_without_an_end_any_cost_pays() -> None:
    assert not Admission().why_not(BEFORE, Times(8.0, 1.0), 1e9)


def test_a_steady_workload_is_expected_to_stay() -> None:
    assert horizon([500.0] * 20, None, 0.1) == HORIZON[1]
    assert horizon([500.0], None, 0.1) == HORIZON[1]
    assert horizon([500.0] * 20, 7, 0.1) == 7


def test_a_faster_drift_has_a_shorter_horizon() -> None:
    slow, fast = ([1000 / factor**step for step in range(20)] for factor in (1.01, 1.015))
    # Until it is off by 30 %: log(1.3) / log(1.01), and of 1.015.
    assert horizon(slow, None, 0.01) == pytest.approx(26.4, abs=0.1)
    assert horizon(fast, None, 0.01) == pytest.approx(17.6, abs=0.1)


def test_lengths_of_a_few_steps_shorten_no_horizon() -> None:
    """Batches without drift, as simulated: the short trajectories end first."""
    assert horizon([977.0, 1227.0], None, 0.17) > 50
    assert horizon([1000.0, 1227.0] * 10, None, 0.17) > 50


def test_chance_is_told_by_how_far_lengths_are_off_beside_two_that_are_as_usual() -> None:
    """Of lengths that grow by .1 a step and are on a line: two of them as far off as ``spread``."""
    lengths, spread = [90.0, 100.0, 110.0], 0.2
    squared_error = 2 * (2 * spread**2) / 3 / 2
    expected = 0.1 / (1 + 0.1) * USUAL**2 / (USUAL**2 + squared_error)
    assert expected_rate(lengths, spread) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), max_size=30), st.none() | st.integers(0, 1000))
def test_a_horizon_is_never_beyond_the_end(lengths: list[float], left: int | None) -> None:
    steps = horizon(lengths, left, 0.1)
    nothing_has_run = not lengths and left is None
    assert 0 <= steps <= (inf if nothing_has_run else HORIZON[1])
    assert left is None or steps <= left


def test_a_plan_is_stale_when_lengths_have_grown_or_shrunk_by_enough() -> None:
    assert drifted(1000, 1310)
    assert drifted(1310, 1000)
    assert not drifted(1000, 1290)


def test_lengths_that_change_are_expected_to_change_on() -> None:
    growing, shrinking = ([1000.0 + 50 * n for n in range(20)], [1000 / 1.03**n for n in range(20)])
    assert expected_change(growing, 5, 0.05) == pytest.approx(1 + 5 * 50 / 1950, rel=0.01)
    assert expected_change(shrinking, 5, 0.05) == pytest.approx(1.03**-5, rel=0.01)


def test_a_change_that_may_be_chance_is_hardly_counted_on() -> None:
    assert expected_change([], inf, 0.1) == expected_change([1000.0], inf, 0.1) == 1.0
    short = [1000.0, 1100.0]
    assert expected_change(short, 5, 0.3) < 1.05 < expected_change(short, 5, 0.001)


@pytest.mark.parametrize(("a_step", "furthest"), [(1.2, FURTHEST), (1 / 1.2, 1 / FURTHEST)])
def test_no_change_is_expected_to_go_on_for_ever(a_step: float, furthest: float) -> None:
    lengths = [1e6 * a_step**step for step in range(20)]
    assert expected_change(lengths, 1, 0.0) != furthest
    assert expected_change(lengths, 1000, 0.0) == furthest
