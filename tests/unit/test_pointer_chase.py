"""The task itself, without a model."""

from __future__ import annotations

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
)
from libra_cli.envs.protocol import Environment, ToolCall, ToolFailed


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
        return environment.step(ToolCall("get", {"key": key}))
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
        environment.step(ToolCall("get", {"key": key}))
    with pytest.raises(ToolFailed, match="no tool 'put'"):
        environment.step(ToolCall("put", {"key": "ab"}))


@pytest.mark.parametrize(
    "args", [{"failure_rate": 1.0}, {"failure_rate": -0.1}, {"hop_weights": []}]
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
