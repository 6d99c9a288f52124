"""What each estimator makes of the rewards of a batch: by hand, and what holds for any rewards."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import STD_FLOOR
from libra_cli.core.algorithms.grpo import grpo
from libra_cli.core.algorithms.reinforce import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from libra_cli.core.algorithms.rloo import rloo
from libra_cli.core.types import Outcome

REWARDS = st.floats(-8, 8).map(lambda value: round(value, 3))
GROUP = st.lists(REWARDS, min_size=2, max_size=8)
BATCH = st.lists(GROUP, min_size=1, max_size=4)


def spec(**settings: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(settings)


UNSCALED, BY_BATCH = spec(scale_rewards="none"), spec(scale_rewards="batch")


def group(*rewards: float, before: tuple[float, ...] = (), tokens: int = 5) -> ComparedGroup:
    return ComparedGroup(
        tuple(Outcome(reward, tokens) for reward in rewards),
        tuple(Outcome(reward, tokens) for reward in before),
    )


def flat(estimate: Estimate) -> list[float]:
    return [value for members in estimate for (value,) in members]


@pytest.mark.parametrize(
    ("rewards", "before", "mean", "std"),
    [
        ((1, 0, 0, 0), (), 0.25, 0.5),
        ((1, 1, 1), (), 1.0, 0.0),
        ((0.3,), (), 0.3, 0.0),
        ((0,), (1, 0, 0), 1 / 3, 0.5),
    ],
)
def test_a_group_is_compared_with_its_own_mean_and_spread(rewards, before, mean, std):
    groups = [group(*rewards, before=before)]
    plain = [reward - mean for reward in rewards]
    assert flat(grpo(groups, UNSCALED)) == pytest.approx(plain)
    assert flat(grpo(groups, spec())) == pytest.approx([one / (std + 1e-4) for one in plain])


@given(batch=BATCH)
def test_scales_are_those_of_trl(batch: list[list[float]]):
    groups = [group(*rewards) for rewards in batch]
    everything = [reward for rewards in batch for reward in rewards]
    stds = {"group": lambda rewards: stdev(rewards), "batch": lambda _: stdev(everything)}
    for scale, std in stds.items():
        found = flat(grpo(groups, spec(scale_rewards=scale)))
        wanted = [
            (reward - fmean(rewards)) / (std(rewards) + STD_FLOOR)
            for rewards in batch
            for reward in rewards
        ]
        assert found == pytest.approx(wanted, abs=1e-6)


@given(rewards=GROUP, scale=st.sampled_from(["group", "batch", "none"]))
def test_the_advantages_of_a_group_have_sum_0(rewards: list[float], scale: str):
    for estimator in (grpo, rloo):
        assert sum(flat(estimator([group(*rewards)], spec(scale_rewards=scale)))) == pytest.approx(
            0, abs=1e-6
        )


@given(rewards=GROUP, shift=REWARDS, factor=st.floats(0.5, 4))
def test_shifted_rewards_change_nothing_and_larger_ones_only_what_is_not_scaled(
    rewards: list[float], shift: float, factor: float
):
    assume(stdev(rewards) > 0.1)
    plain = flat(grpo([group(*rewards)], UNSCALED))
    other = [group(*(reward * factor + shift for reward in rewards))]
    assert flat(grpo(other, UNSCALED)) == pytest.approx([factor * one for one in plain], abs=1e-6)
    scaled = flat(grpo([group(*rewards)], spec()))
    assert flat(grpo(other, spec())) == pytest.approx(scaled, rel=4e-3)


@given(rewards=GROUP)
def test_leaving_one_out_is_n_over_n_less_1_times_the_mean_of_all(rewards: list[float]):
    count = len(rewards)
    found = flat(rloo([group(*rewards)], spec()))
    others = [mine - (sum(rewards) - mine) / (count - 1) for mine in rewards]
    assert found == pytest.approx(others, abs=1e-9)
    mean = flat(grpo([group(*rewards)], UNSCALED))
    assert found == pytest.approx([one * count / (count - 1) for one in mean])


@given(value=REWARDS, size=st.integers(1, 9), scale=st.sampled_from(["group", "batch", "none"]))
def test_equal_rewards_have_advantages_of_exactly_0(value: float, size: int, scale: str):
    for estimator in (grpo, rloo):
        found = flat(estimator([group(*[value] * size)], spec(scale_rewards=scale)))
        assert found == [0.0] * size


def test_late_members_are_compared_with_those_that_were_finished():
    late = group(1.0, before=(0.0, 1.0, 0.0, 0.0))
    assert flat(grpo([late], UNSCALED)) == [0.75]
    assert flat(rloo([late], UNSCALED)) == [0.75], "it is none of those it is compared with"
    two = group(1.0, 0.0, before=(0.0, 1.0, 0.0, 0.0))
    assert flat(rloo([two], UNSCALED)) == [0.75, -0.25], "nor are two that are late together"


@given(data=st.data(), batch=BATCH)
def test_reinforce_plus_plus_is_normalised_over_tokens(data: Any, batch: list[list[float]]):
    groups, by_token, centred = [], [], []
    for rewards in batch:
        sizes = [data.draw(st.integers(1, 9)) for _ in rewards]
        groups.append(ComparedGroup(tuple(map(Outcome, rewards, sizes))))
        for reward, size in zip(rewards, sizes, strict=True):
            by_token += [reward] * size
            centred += [reward - fmean(rewards)] * size
    for estimator, values in (
        (reinforce_plus_plus, by_token),
        (reinforce_plus_plus_baseline, centred),
    ):
        mean, variance = fmean(values), stdev(values) ** 2
        wanted = [(value - mean) / sqrt(variance + 1e-8) for value in values]
        found = [
            value
            for one, members in zip(groups, estimator(groups, spec()), strict=True)
            for member, (value,) in zip(one.members, members, strict=True)
            for _ in range(member.generated)
        ]
        assert found == pytest.approx(wanted, abs=1e-5)
