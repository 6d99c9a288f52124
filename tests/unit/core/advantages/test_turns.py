"""Advantages by turn: by hand, and what holds for any rewards."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import STD_FLOOR
from libra_cli.core.algorithms.gigpo import gigpo
from libra_cli.core.algorithms.grpo import grpo
from libra_cli.core.algorithms.turn import returns_of, turn
from libra_cli.core.types import Outcome, TurnReward

REWARD = st.floats(-8, 8).map(lambda value: round(value, 3))
TURNS = st.lists(REWARD, min_size=1, max_size=5)
SCALE = st.sampled_from(["group", "batch", "none"])


def spec(**settings: Any) -> TrainingSpec:
    return TrainingSpec.model_validate({"advantage": "turn", **settings})


UNSCALED = spec(scale_rewards="none")


def played(*rewards: float, shown: str = "") -> Outcome:
    """A trajectory with these rewards by turn; it was shown something else each turn, or this."""
    turns = [
        TurnReward(0, 4 * place, 4 * place + 3, reward, ord(shown[place]) if shown else place)
        for place, reward in enumerate(rewards)
    ]
    return Outcome(sum(rewards), 3 * len(rewards), tuple(turns))


def group(*members: Outcome, before: tuple[Outcome, ...] = ()) -> ComparedGroup:
    return ComparedGroup(members, before)


def flat(estimate: Estimate) -> list[float]:
    return [value for members in estimate for values in members for value in values]


@given(rewards=st.lists(REWARD, min_size=2, max_size=8), scale=SCALE)
def test_with_one_turn_it_is_grpo(rewards: list[float], scale: str):
    groups = [group(*map(played, rewards)), group(played(1.0), played(0.0))]
    settings = spec(scale_rewards=scale)
    assert flat(turn(groups, settings)) == pytest.approx(flat(grpo(groups, settings)), rel=1e-6)


@given(rewards=st.lists(REWARD, min_size=2, max_size=8), count=st.integers(1, 5))
def test_with_one_reward_at_the_end_of_equally_many_turns_every_turn_has_that_of_the_whole(
    rewards: list[float], count: int
):
    members = [played(*[0.0] * (count - 1), reward) for reward in rewards]
    found = turn([group(*members)], UNSCALED)[0]
    whole = grpo([group(*members)], UNSCALED)[0]
    for values, (value,) in zip(found, whole, strict=True):
        assert values == pytest.approx([value] * count)


@given(rewards=TURNS, gamma=st.floats(0, 1))
def test_a_return_is_what_the_turn_earns_and_the_next_return_discounted(
    rewards: list[float], gamma: float
):
    found = [*returns_of(played(*rewards), gamma), 0.0]
    for place, reward in enumerate(rewards):
        assert found[place] == pytest.approx(reward + gamma * found[place + 1])


@given(members=st.lists(TURNS, min_size=2, max_size=6), scale=SCALE)
def test_the_advantages_of_a_turn_that_several_have_sum_to_0(
    members: list[list[float]], scale: str
):
    found = turn([group(*(played(*rewards) for rewards in members))], spec(scale_rewards=scale))[0]
    for place in range(5):
        values = [one[place] for one in found if len(one) > place]
        if len(values) > 1:
            assert sum(values) == pytest.approx(0, abs=1e-6)


@given(earlier=st.lists(REWARD, min_size=2, max_size=6))
def test_what_was_earned_before_a_turn_does_not_change_it(earlier: list[float]):
    last = [float(place % 2) for place in range(len(earlier))]
    members = [played(*rewards) for rewards in zip(earlier, last, strict=True)]
    found = turn([group(*members)], UNSCALED)[0]
    mean = fmean(last)
    assert [values[1] for values in found] == pytest.approx([one - mean for one in last])


def test_equal_totals_may_have_signal():
    found = turn([group(played(1, 0), played(0, 1))], UNSCALED)
    assert found == [[(0.0, -0.5), (0.0, 0.5)]]


def test_the_only_one_with_a_turn_is_compared_with_the_turn_before():
    members = (played(0), played(1), played(0, 0, 2))
    assert turn([group(*members)], UNSCALED) == [[(-1.0,), (0.0,), (1.0, 1.0, 1.0)]]


def test_late_members_are_compared_by_turn_with_those_that_were_finished():
    late = group(played(0, 1, 1), before=(played(1), played(0, 1)))
    assert turn([late], UNSCALED) == [[(1.0, 1.0, 0.0)]]


def test_the_standard_deviation_is_of_all_returns_about_their_turns():
    found = turn([group(played(0, 1), played(2, 3))], spec())
    std = ((4 + 4 + 1 + 1) / 3) ** 0.5 + STD_FLOOR
    assert flat(found) == pytest.approx([-2 / std, -1 / std, 2 / std, 1 / std])
    assert returns_of(played(0, 1), 1.0) + returns_of(played(2, 3), 1.0) == (1, 1, 5, 3)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_adds_the_whole_and_what_was_made_of_the_same_state(scale: str):
    """Equations 3, 7 and 8 of arXiv 2505.10978, by hand; ``b`` was seen twice, ``c`` once."""
    members = (played(0, 1, shown="ab"), played(0, 0, shown="ac"), played(0, 0, 1, shown="abb"))
    gamma = 0.9
    found = gigpo([group(*members)], spec(gamma=gamma, scale_rewards=scale))[0]
    whole = [values[0] for values in grpo([group(*members)], spec(scale_rewards=scale))[0]]
    returns = {"a": [0.9, 0.0, 0.81], "b": [1.0, 0.9, 1.0], "c": [0.0]}

    def step(state: str, place: int) -> float:
        values = returns[state]
        std = 1.0 if scale == "none" or len(values) == 1 else stdev(values) + STD_FLOOR
        return (values[place] - fmean(values)) / std

    wanted = [
        (whole[0] + step("a", 0), whole[0] + step("b", 0)),
        (whole[1] + step("a", 1), whole[1] + step("c", 0)),
        (whole[2] + step("a", 2), whole[2] + step("b", 1), whole[2] + step("b", 2)),
    ]
    for values, mine in zip(found, wanted, strict=True):
        assert values == pytest.approx(mine, abs=1e-9)


def test_without_a_state_that_two_were_shown_gigpo_is_grpo():
    members = (played(0, 1, shown="ab"), played(0, 0, shown="cd"))
    found = gigpo([group(*members)], UNSCALED)
    assert found == [[(0.5, 0.5), (-0.5, -0.5)]]
