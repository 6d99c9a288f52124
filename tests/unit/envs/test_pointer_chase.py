"""The task itself, without a model."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.envs.pointer_chase import (
    BUSY,
    CALL_HEAD,
    CALL_TAIL,
    PointerChase,
    Store,
    demonstration,
    factor_at,
)
from libra_cli.envs.protocol import Environment, StepResult, ToolCall, ToolFailed


def test_it_is_an_environment():
    assert isinstance(PointerChase(), Environment)


def test_the_prompt_names_the_first_key_and_the_hops():
    environment = PointerChase()
    (message,) = environment.reset({"start": "ab", "hops": 3, "salt": "x"}, 0)
    assert message == {"role": "user", "content": "start ab hops 3"}


@given(index=st.integers(0, 10**9), seed=st.integers(0, 10**9))
def test_who_follows_the_keys_scores_one_and_who_stops_early_does_not(index: int, seed: int):
    environment = PointerChase(failure_rate=0.3)
    task = environment.task(index, seed)
    environment.reset(task, seed)
    key, before = str(task["start"]), ""
    for _ in range(int(task["hops"])):
        before = key
        key = _insist(environment, key)
    assert environment.score(key) == 1.0
    assert environment.score(f" {key}\n") == 1.0
    if before != key:
        assert environment.score(before) == 0.0


def _insist(environment: PointerChase, key: str) -> str:
    for _ in range(1000):
        if (read := _try(environment, key)) != BUSY:
            return read
    raise AssertionError("always busy")


def test_members_of_a_group_play_the_same_game():
    first, second = PointerChase(failure_rate=0.5), PointerChase(failure_rate=0.5)
    task = first.task(7, 1)
    assert task == second.task(7, 1)
    first.reset(task, 3)
    second.reset(task, 3)
    assert [_try(first, "ab") for _ in range(50)] == [_try(second, "ab") for _ in range(50)]


def _try(environment: PointerChase, key: str) -> str:
    try:
        return environment.look_up(ToolCall("get", {"key": key}))
    except ToolFailed as failure:
        return str(failure)


def test_hop_counts_are_heavy_tailed():
    environment = PointerChase()
    counts = Counter(int(environment.task(index, 0)["hops"]) for index in range(2000))
    assert set(counts) == set(range(1, 9))
    assert counts[1] > counts[3] > counts[8] > 0


@pytest.mark.parametrize("key", ["a", "abc", "A1", 7, None])
def test_a_malformed_key_is_a_tool_error(key: object):
    environment = PointerChase(failure_rate=0.0)
    environment.reset(environment.task(0, 0), 0)
    with pytest.raises(ToolFailed, match="no such key"):
        environment.look_up(ToolCall("get", {"key": key}))
    with pytest.raises(ToolFailed, match="no tool 'put'"):
        environment.step(ToolCall("put", {"key": "ab"}))


@pytest.mark.parametrize(
    "args",
    [
        {"failure_rate": 1.0},
        {"failure_rate": -0.1},
        {"hop_weights": []},
        {"drift": [1.0, 0.0], "drift_tasks": 10},
        {"drift": [1.0, math.inf], "drift_tasks": 10},
        {"drift": [1.0, 4.0]},
        {"drift_tasks": 10},
        {"drift": [1.0, 4.0], "drift_tasks": -1},
    ],
)
def test_impossible_arguments_are_refused(args: dict[str, object]):
    with pytest.raises(ValueError, match="must be"):
        PointerChase(**args)  # type: ignore[arg-type]


def test_an_expert_without_slips_always_scores_and_calls_one_tool_a_turn():
    for index in range(50):
        environment = PointerChase()
        task = environment.task(index, 0)
        turns = list(demonstration(environment, task, index, rng=random.Random(0), slips=0.0))
        *calls, (answer, nothing) = turns
        assert nothing == ""
        assert environment.score(answer) == 1.0
        assert answer == Store(str(task["salt"])).follow(str(task["start"]), int(task["hops"]))
        assert all(said.startswith(CALL_HEAD) and said.endswith(CALL_TAIL) for said, _ in calls)
        assert sum(read != BUSY for _, read in calls) == task["hops"]


def _mean_hops(environment: PointerChase, tasks: range) -> float:
    return sum(int(environment.task(index, 0)["hops"]) for index in tasks) / len(tasks)


def test_a_drift_takes_the_mean_through_its_factors():
    steady, drifting = PointerChase(), PointerChase(drift=[1, 2, 1], drift_tasks=4000)
    for at, factor in ((0, 1.05), (1000, 1.5), (1950, 1.97), (3000, 1.5), (4000, 1.0), (9000, 1.0)):
        near = range(at, at + 100) if factor > 1.0 else range(at, at + 1000)
        unscaled = [int(steady.task(index, 0)["hops"]) for index in near]
        expected = sum(min(8.0, hops * factor) for hops in unscaled) / len(unscaled)
        assert _mean_hops(drifting, near) == pytest.approx(expected, rel=0.05)


def test_scaled_hops_stay_between_one_and_what_the_model_has_practised():
    many = PointerChase(drift=[100.0], drift_tasks=1)
    few = PointerChase(drift=[0.01], drift_tasks=1)
    longer = PointerChase(drift=[100.0], drift_tasks=1, hop_weights=[1.0] * 12)
    assert {many.task(index, 0)["hops"] for index in range(200)} == {8}
    assert {few.task(index, 0)["hops"] for index in range(200)} == {1}
    assert {longer.task(index, 0)["hops"] for index in range(200)} == {12}


@given(index=st.integers(0, 10**9), seed=st.integers(0, 10**9))
def test_a_drifting_task_is_made_of_its_number_and_the_seed_alone(index: int, seed: int):
    used = PointerChase(drift=[1.0, 4.0, 0.5], drift_tasks=1000)
    used.task(index + 1, seed)
    fresh = PointerChase(drift=[1.0, 4.0, 0.5], drift_tasks=1000)
    assert used.task(index, seed) == fresh.task(index, seed)


@given(index=st.integers(0, 10**9), seed=st.integers(0, 10**9))
def test_a_factor_of_one_changes_nothing(index: int, seed: int):
    drifting = PointerChase(drift=[1.0, 1.0], drift_tasks=1000)
    assert drifting.task(index, seed) == PointerChase().task(index, seed)


def test_a_task_without_drift_is_the_one_it_always_was():
    assert PointerChase().task(7, 1) == {"start": "ig", "hops": 1, "salt": "1.7"}


@pytest.mark.parametrize(
    ("share", "factor"), [(0.0, 1.0), (0.25, 2.5), (0.5, 4.0), (0.75, 3.0), (1.0, 2.0), (7.0, 2.0)]
)
def test_factors_are_joined_by_straight_lines_and_the_last_one_holds(share: float, factor: float):
    assert factor_at([1.0, 4.0, 2.0], share) == pytest.approx(factor)


def test_tools_with_a_heavy_tail_take_what_their_law_says():
    environment = PointerChase(latency_s={"median": 0.05, "most": 2.0})
    waits = []
    for index in range(200):
        environment.reset(environment.task(index, seed=1), seed=index)
        waits += [environment.wait_s(call) for call in range(1, 11)]
    waits.sort()
    assert 0.04 < waits[1000] < 0.06
    assert waits[-1] == 2.0
    assert 0.5 < sum(wait == 2.0 for wait in waits) / 20 < 2.0
    environment.reset(environment.task(3, seed=1), seed=7)
    again = [environment.wait_s(call) for call in range(1, 5)]
    environment.reset(environment.task(3, seed=1), seed=7)
    assert [environment.wait_s(call) for call in range(1, 5)] == again


@pytest.mark.parametrize(
    "latency_s", [{"median": 1.0}, {"median": 2.0, "most": 1.0}, {"median": 0, "most": 1}]
)
def test_a_tail_that_is_none_is_refused(latency_s):
    with pytest.raises(ValueError, match="latency_s must be seconds, or"):
        PointerChase(latency_s=latency_s)


def test_hops_and_the_answer_share_the_reward_if_each_turn_has_its_own():
    rewarded = PointerChase(failure_rate=0.0, turn_rewards=True)
    task = {"start": "ab", "hops": 3, "salt": "1"}
    rewarded.reset(task, 0)
    keys = [Store("1").follow("ab", hops) for hops in range(4)]

    def reward(key: str) -> float:
        result = rewarded.step(ToolCall("get", {"key": key}))
        assert isinstance(result, StepResult)
        return result.reward

    earned = [reward(key) for key in (keys[0], keys[0])]
    assert earned == [0.25, 0.0], "the same key again is not the next one"
    earned += [reward(key) for key in keys[1:3]]
    assert sum(earned) + rewarded.score(keys[3]) == 1.0
    plain = PointerChase(failure_rate=0.0)
    plain.reset(task, 0)
    assert isinstance(plain.step(ToolCall("get", {"key": "ab"})), str)
    assert plain.score(keys[3]) == 1.0
