"""Advantages of turns by GAE: against the sum of its definition, and what holds of any rewards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy", reason="needs torch")

from libra_cli.config.training import TrainingSpec  # noqa: E402
from libra_cli.core.algorithms.turn import returns_of  # noqa: E402
from libra_cli.core.types import Outcome, TurnReward  # noqa: E402
from libra_cli.node.batch.samples import TokenSample  # noqa: E402
from libra_cli.node.critic.advantages import (  # noqa: E402
    credited,
    generalized_advantages,
    scaled,
    turn_advantages,
    whitened,
)

NUMBER = st.floats(-8, 8).map(lambda value: round(value, 3))
TURNS = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=7)
SHARE = st.floats(0, 1)


def spec(**settings: Any) -> TrainingSpec:
    return TrainingSpec.model_validate({"advantage": "gae", **settings})


def split(turns: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [reward for reward, _ in turns], [value for _, value in turns]


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> Any:
    ahead = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, ahead, values, strict=True)]
    return [
        sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[turn:]))
        for turn in range(len(deltas))
    ]


def sample(member: int, *turns: tuple[int, int, float], length: int = 12) -> TokenSample:
    """Every third token is not generated."""
    mask = (np.arange(length) % 3 != 0).astype(np.int8)
    zeros = np.zeros(length, dtype=np.float32)
    return TokenSample(0, member, np.zeros(length, "i4"), zeros, mask, 0.0, False, turns=turns)


@given(turns=TURNS, gamma=SHARE, lam=SHARE)
def test_it_is_the_discounted_sum_of_what_the_critic_was_off_by(
    turns: list[tuple[float, float]], gamma: float, lam: float
):
    rewards, values = split(turns)
    found = generalized_advantages(rewards, values, gamma=gamma, lam=lam)
    assert found == pytest.approx(by_definition(rewards, values, gamma, lam), abs=1e-9)


@given(rewards=st.lists(NUMBER, min_size=1, max_size=7), gamma=SHARE)
def test_of_a_critic_that_says_0_it_is_the_return(rewards: list[float], gamma: float):
    turns = tuple(TurnReward(0, 0, 0, reward) for reward in rewards)
    found = generalized_advantages(rewards, [0.0] * len(rewards), gamma=gamma, lam=1.0)
    assert found == pytest.approx(returns_of(Outcome(sum(rewards), 1, turns), gamma))


@given(turns=TURNS, gamma=SHARE)
def test_with_lam_1_the_target_of_a_value_does_not_depend_on_the_critic(
    turns: list[tuple[float, float]], gamma: float
):
    rewards, values = split(turns)
    found = generalized_advantages(rewards, values, gamma=gamma, lam=1.0)
    returns = generalized_advantages(rewards, [0.0] * len(rewards), gamma=gamma, lam=1.0)
    assert [a + v for a, v in zip(found, values, strict=True)] == pytest.approx(returns, abs=1e-9)


@given(turns=TURNS, gamma=SHARE)
def test_with_lam_0_it_is_what_one_turn_was_off_by(turns: list[tuple[float, float]], gamma: float):
    rewards, values = split(turns)
    (*_, last) = generalized_advantages(rewards, values, gamma=gamma, lam=0.0)
    assert last == pytest.approx(rewards[-1] - values[-1])


@given(
    weighed=st.lists(st.tuples(NUMBER, st.integers(1, 9)), min_size=2, max_size=9).filter(
        lambda rows: len({value for value, _ in rows}) > 1
    )
)
def test_whitened_values_have_mean_0_and_variance_1_over_tokens(weighed: list[tuple[float, int]]):
    values, weights = [value for value, _ in weighed], [weight for _, weight in weighed]
    spread = np.repeat(whitened(values, weights), weights)
    assert spread.mean() == pytest.approx(0.0, abs=1e-6)
    assert spread.std(ddof=1) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, 0.1, 0.1]])
def test_values_that_are_all_the_same_are_whitened_to_0(values: list[float]):
    assert whitened(values, [7] * len(values)) == [0.0] * len(values)


def test_turns_are_in_order_through_all_branches_of_a_trajectory():
    """Turn 1 is in another branch than turns 0 and 2."""
    samples = [sample(0, (0, 1, 1.0), (2, 7, 4.0)), sample(0, (1, 4, 2.0))]
    values = {(0, 0, 0): 0.5, (0, 0, 1): 0.25, (0, 0, 2): 2.0}
    found = turn_advantages(samples, values, spec(gamma=0.5, lam=0.5))
    wanted = by_definition([1.0, 2.0, 4.0], [0.5, 0.25, 2.0], 0.5, 0.5)
    assert [found[0, 0, turn] for turn in range(3)] == pytest.approx(wanted)


def test_trajectories_of_a_group_do_not_touch_one_another():
    samples = [sample(0, (0, 1, 1.0)), sample(1, (0, 1, 5.0), (1, 4, 3.0))]
    values = {(0, member, turn): 0.0 for member in (0, 1) for turn in (0, 1)}
    found = turn_advantages(samples, values, spec())
    assert found == {(0, 0, 0): 1.0, (0, 1, 0): 8.0, (0, 1, 1): 3.0}


def test_every_token_has_that_of_its_turn_weighed_by_the_tokens_that_count():
    samples = [sample(0, (0, 1, 0.0), (1, 7, 0.0)), sample(1, (0, 4, 0.0)), sample(2)]
    raw = {(0, 0, 0): 1.0, (0, 0, 1): -2.0, (0, 1, 0): 0.5}
    weights = scaled(raw, samples, spec())
    normal = whitened([1.0, -2.0, 0.5], [4, 4, 6])
    assert list(weights.values()) == normal
    first, second, third = credited(samples, weights)
    assert first.advantages == ((1, normal[0]), (7, normal[1]))
    assert second.advantages == ((4, normal[2]),)
    assert third.advantages == ()


def test_without_a_scale_they_are_as_they_are():
    samples = [sample(0, (0, 1, 0.0)), sample(1, (0, 1, 0.0))]
    raw = {(0, 0, 0): 3.0, (0, 1, 0): 5.0}
    assert scaled(raw, samples, spec(scale_rewards="none")) == raw
