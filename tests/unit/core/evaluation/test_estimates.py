"""pass@k, mean rewards and their intervals."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb, isclose
from random import Random
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.evaluation.estimates import (
    evaluation_metrics,
    mean_estimate,
    pass_at,
    pass_estimate,
    powers_up_to,
    wilson,
)

samples = st.lists(st.booleans(), min_size=1, max_size=8)
tasks = st.lists(samples, min_size=1, max_size=6)


@given(samples, st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_pass(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = [any(chosen) for chosen in combinations(passed, k)]
    assert len(choices) == comb(len(passed), k)
    estimate = pass_at(k, passed=sum(passed), samples=len(passed))
    assert isclose(estimate, fmean(choices), abs_tol=1e-12)


@given(tasks)
def test_pass_at_k_grows_with_k_and_lies_in_its_interval_within_0_and_1(
    played: list[list[bool]],
) -> None:
    whole = [one * 8 for one in played]
    values = []
    for k in (1, 2, 4, 8):
        estimate = pass_estimate(k, whole)
        assert estimate is not None
        assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
        values.append(estimate.value)
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


@given(tasks)
def test_pass_at_1_is_the_mean_of_the_shares_of_the_tasks(played: list[list[bool]]) -> None:
    estimate = pass_estimate(1, played)
    assert estimate is not None
    assert isclose(estimate.value, fmean(map(fmean, played)), abs_tol=1e-12)


@given(tasks, st.integers(0, 2**32))
def test_the_order_of_tasks_and_samples_says_nothing(played: list[list[bool]], seed: int) -> None:
    random = Random(seed)
    shuffled = [random.sample(one, len(one)) for one in random.sample(played, len(played))]
    before, after = pass_estimate(1, played), pass_estimate(1, shuffled)
    assert before is not None
    assert after is not None
    assert isclose(before.low, after.low, abs_tol=1e-9)
    assert isclose(before.high, after.high, abs_tol=1e-9)


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_of_one_sample_a_task_the_interval_is_nearly_wilsons(played: list[bool]) -> None:
    estimate = pass_estimate(1, [[one] for one in played])
    assert estimate is not None
    plain = wilson(fmean(played), len(played))
    # The variance of a sample is divided by n - 1, so one sample less counts.
    other = wilson(fmean(played), max(1, len(played) - 1))
    assert min(plain[0], other[0]) - 1e-9 <= estimate.low <= max(plain[0], other[0]) + 1e-9


def test_samples_of_one_task_that_all_agree_are_worth_one() -> None:
    played = [[True] * 16, [False] * 16, [True] * 16, [False] * 16]
    once = [[one[0]] for one in played]
    assert pass_estimate(1, played) == pass_estimate(1, once)


def test_two_tasks_that_disagree_are_worth_one_sample() -> None:
    estimate = pass_estimate(1, [[True], [False]])
    assert estimate is not None
    assert isclose(estimate.low, wilson(0.5, 1)[0], rel_tol=1e-9)


def test_the_interval_of_tasks_that_all_pass_is_not_empty() -> None:
    estimate = pass_estimate(1, [[True, True]] * 10)
    assert estimate is not None
    assert estimate.high == 1.0
    assert 0.6 < estimate.low < 0.8  # Wilson's of 10 of 10: 0.722


def test_nine_in_ten_intervals_and_more_hold_the_chance_that_was_drawn_from() -> None:
    random = Random(5)
    held = 0
    for _ in range(300):
        chances = [random.betavariate(1, 1) for _ in range(40)]
        estimate = pass_estimate(1, [[random.random() < p for _ in range(4)] for p in chances])
        assert estimate is not None
        held += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= held / 300 <= 0.98


def test_a_task_with_fewer_samples_than_k_is_left_out() -> None:
    estimate = pass_estimate(2, [[True], [True, False]])
    assert estimate is not None
    assert (estimate.value, estimate.tasks) == (1.0, 1)
    assert pass_estimate(3, [[True], [True, False]]) is None


def test_the_mean_reward_has_the_error_of_the_means_of_tasks() -> None:
    estimate = mean_estimate([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], []])
    assert estimate is not None
    assert estimate.value == 0.5
    # Student's t of two degrees of freedom, of three tasks.
    assert isclose(estimate.high - estimate.low, 2 * 4.302653 * 0.5 / 3**0.5, rel_tol=1e-6)
    assert mean_estimate([[]]) is None


def test_told_are_powers_of_two_and_the_number_of_samples() -> None:
    assert powers_up_to(1) == [1]
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert powers_up_to(8) == [1, 2, 4, 8]


def test_a_reward_passes_from_the_threshold_on() -> None:
    told = evaluation_metrics([[0.5, 1.0], [0.2, 0.4]], samples=2, success=0.5)
    assert (told["pass@1"], told["pass@2"]) == (0.5, 0.5)
    assert isclose(told["avg@2"], 0.525)
    assert told["pass@1/low"] < 0.5 < told["pass@1/high"]


def test_intervals_of_mean_rewards_of_few_tasks_hold_as_often_as_they_say() -> None:
    random, held = Random(7), 0
    for _ in range(400):
        estimate = mean_estimate([[random.gauss(0.3, 1.0)] for _ in range(3)])
        assert estimate is not None
        held += estimate.low <= 0.3 <= estimate.high
    assert 0.92 <= held / 400 <= 0.98


def test_the_reward_of_one_task_has_no_interval_and_its_passes_have() -> None:
    told = evaluation_metrics([[1.0, 0.0, 0.0, 0.0]], samples=4, success=1.0)
    assert told["avg@4"] == 0.25
    assert not {"avg@4/low", "avg@4/high"} & set(told)
    assert {"pass@1/low", "pass@1/high"} <= set(told)
