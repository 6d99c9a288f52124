"""Which environment a group plays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra_cli.runtime.tasks.weighted_turns import Mixture

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(1, 300))
def test_each_environment_has_had_its_share_to_within_one_group(weights, groups):
    mixture = Mixture(weights)
    played = [mixture.of(group)[0] for group in range(groups)]
    if len(weights) == 1:
        return
    for number, weight in enumerate(weights):
        share = weight / sum(weights) * groups
        assert abs(played.count(number) - share) < len(weights)


@given(WEIGHTS, st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_group_plays_the_same_whenever_it_is_asked_for(weights, asked):
    mixture = Mixture(weights)
    first = [mixture.of(group) for group in asked]
    assert [mixture.of(group) for group in asked] == first
    assert [Mixture(weights).of(group) for group in asked] == first


@given(WEIGHTS)
def test_an_environment_numbers_its_own_groups_without_gaps(weights):
    mixture = Mixture(weights)
    seen: dict[int, list[int]] = {}
    for group in range(50):
        number, index = mixture.of(group)
        seen.setdefault(number, []).append(index)
    assert all(indices == list(range(len(indices))) for indices in seen.values())


def test_two_of_equal_weight_take_turns():
    assert [Mixture([1.0, 1.0]).of(group)[0] for group in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [Mixture([3.0, 1.0]).of(group)[0] for group in range(8)] == [0, 0, 1, 0] * 2
