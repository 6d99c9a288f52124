"""Batches of tokens that are many versions old: a wide staleness bound, and replay."""

from __future__ import annotations

from json import loads
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core.rollout.once import check_once
from tests.world import Faults, World, recipe

FAULTS = Faults(
    server_dies=0.005, turn_fails=0.02, environment_breaks=0.02, trainer_dies=0.02, forked=0.2
)


@pytest.mark.parametrize("bound", [8, 16])
@pytest.mark.parametrize("rule", ["hold", "cut", "soft", "token"])
def test_a_run_may_be_many_versions_off_policy(bound, rule):
    training = {"max_staleness": bound, "staleness": rule, "groups_per_step": 1}
    world = World(Random(bound), recipe=recipe(training=training)).run()
    assert world.end is not None
    assert world.end.state == "finished"
    assert {row.step for row in world.steps} == set(range(1, 1 + world.recipe.run.steps))


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), sampling=st.sampled_from(["recent", "reward", "advantage"]))
def test_whatever_happens_a_replayed_group_was_trained_before_and_counts_once(seed, sampling):
    replay = {"groups": 2, "capacity": 6, "sampling": sampling}
    world = World(Random(seed), FAULTS, recipe(replay=replay)).run()
    assert world.end is not None
    assert check_once(world.records) == []
    for row in world.steps:
        assert row.batch["replayed_groups"] == len(loads(row.replayed_json)) <= 2
