"""Lengths of trajectories of which most are still under way."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.survival import TurnSurvival, completed
from libra_cli.core.workload import TrajectorySample

TURNS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def sample(turns: int) -> TrajectorySample:
    return TrajectorySample(prompt=100, generated=10 * turns, observed=5 * turns, turns=turns)


def test_the_curve_of_a_small_example_is_that_of_the_product_limit() -> None:
    """Ended with 1, 2, 2 and 4 turns, and three that have 2, 3 and 5 so far: of 7, 6 and 2 at
    risk 1, 2 and 1 ended, so 6/7, 6/7 x 4/6 and 6/7 x 4/6 x 1/2 have more turns."""
    survival = TurnSurvival([2, 1, 4, 2], alive=[5, 2, 3])
    expected = [1.0, 6 / 7, 4 / 7, 4 / 7, 2 / 7]
    assert [survival.above(turns) for turns in range(5)] == pytest.approx(expected)


def test_beyond_the_last_known_turn_the_newest_chance_of_ending_goes_on() -> None:
    """The last turns at risk are two of 7 + 6 + 2 x 2, at which one ended: a quarter a turn."""
    survival = TurnSurvival([1, 2, 2, 4], alive=[2, 3, 5])
    assert survival.tail == pytest.approx(1 / 4)
    assert survival.above(6) == pytest.approx(2 / 7 * (3 / 4) ** 2)
    assert survival.quantile(0.5, after=5) == 5 + 3  # 0.75^3 is the first below a half
    assert survival.quantile(0.5) == 4  # the least k of which no more than half have more


def test_nothing_is_told_where_none_has_ended() -> None:
    with pytest.raises(ValueError, match="no trajectory has ended"):
        TurnSurvival([], alive=[1, 2])


@given(TURNS)
def test_where_all_have_ended_the_curve_is_the_share_that_had_more(ended: list[int]) -> None:
    survival = TurnSurvival(ended)
    for turns in range(max(ended)):
        more = sum(one > turns for one in ended) / len(ended)
        assert survival.above(turns) == pytest.approx(more)
    assert completed([sample(one) for one in ended], []) == tuple(map(sample, ended))


@given(TURNS, TURNS, st.floats(0, 0.999))
def test_a_quantile_is_where_the_curve_has_come_down(
    ended: list[int], alive: list[int], share: float
) -> None:
    survival = TurnSurvival(ended, alive)
    for after in (0, *alive):
        found = survival.quantile(share, after=after)
        assert found > after
        wanted = (1 - share) * survival.above(after)
        assert survival.above(found) <= wanted * (1 + 1e-9)
        if found > after + 1:
            assert survival.above(found - 1) >= wanted * (1 - 1e-9)


@given(TURNS, TURNS)
def test_those_under_way_become_longer_and_those_that_ended_stay(
    ended: list[int], alive: list[int]
) -> None:
    so_far = [sample(one) for one in alive]
    found = completed([sample(one) for one in ended], so_far)
    assert found[: len(ended)] == tuple(map(sample, ended))
    grown = sorted(found[len(ended) :], key=lambda one: one.turns)
    for before, after in zip(sorted(alive), grown, strict=True):
        assert after.turns > before
        assert after.generated == pytest.approx(10 * after.turns, abs=1)
        assert after.prompt == 100


@pytest.mark.parametrize("seen", [4, 8, 16])
def test_censored_draws_give_back_the_mean_they_were_drawn_with(seen: int) -> None:
    """A thousand geometric lengths of 12 turns on average, cut after ``seen`` turns or sooner."""
    random = Random(seen)
    true, told, biased, errors = [], [], [], []
    for _ in range(20):
        lengths = [1 + int(random.expovariate(1 / 11.5)) for _ in range(1000)]
        limits = [random.randint(1, seen) for _ in lengths]
        both = list(zip(lengths, limits, strict=True))
        ended = [sample(length) for length, limit in both if length <= limit]
        alive = [sample(limit) for length, limit in both if length > limit]
        true.append(fmean(lengths))
        biased.append(fmean(one.turns for one in ended))
        told.append(fmean(one.turns for one in completed(ended, alive)))
        survival = TurnSurvival((one.turns for one in ended), (one.turns for one in alive))
        errors.append(survival.error)
    assert fmean(biased) < fmean(true) / 1.5
    assert fmean(told) == pytest.approx(fmean(true), rel=0.1)
    within = [
        abs(one / other - 1) <= 3 * error
        for one, other, error in zip(told, true, errors, strict=True)
    ]
    assert sum(within) >= 18


def test_more_trajectories_tell_the_mean_better() -> None:
    few = TurnSurvival([1, 2, 3, 5, 8], alive=[2, 6, 6])
    many = TurnSurvival([1, 2, 3, 5, 8] * 100, alive=[2, 6, 6] * 100)
    assert many.error == pytest.approx(few.error / 10)
    assert 0 < few.error < 1
