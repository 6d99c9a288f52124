"""How many slots train to begin with, where the recipe leaves it open."""

from __future__ import annotations

import pytest

from libra_cli.core.launch.placement import initial_plan
from tests import world


@pytest.mark.parametrize(
    ("pools", "train"),
    [
        (["auto"] * 2, 1),
        (["auto"] * 3, 1),
        (["auto"] * 4, 2),  # a third, rounded up
        (["auto"] * 6, 2),
        (["rollout", "auto"], 1),  # the only free one trains where another serves
        (["train", "auto"], 1),  # and serves where another trains
        (["train", "auto", "auto", "auto"], 2),
        (["train", "train", "auto", "auto"], 2),
        (["rollout", "rollout", "train", "train"], 2),
    ],
)
def test_a_third_of_the_slots_trains_and_one_at_least_does_each(pools: list[str], train: int):
    node = {"host": "a", "slots": len(pools), "pool": pools}
    plan = initial_plan(world.recipe(nodes=[node]))
    assert len(plan.train) == train
    assert len(plan.servers) == len(pools) - train
