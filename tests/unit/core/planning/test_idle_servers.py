"""Servers on the trainer's GPUs that take requests while it waits: their worth, their memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.planning.idle_servers import CONTEXTS, IdleServers, shares_that_fit
from libra_cli.core.planning.recipe_placement import RecipePlacement
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile

PROFILE = load_profile("a800-qwen3-14b")
WHOLE = 0.9
"""The share of its GPUs' memory that a server alone has."""


def work(mean: float = 3000, *, overlap: float = 2.0) -> Workload:
    random = Random(0)
    lengths = (int(mean * random.lognormvariate(-0.5, 1.0)) for _ in range(128))
    samples = tuple(TrajectorySample(500, min(20_000, max(1, n)), 1000, 5, 5.0) for n in lengths)
    return Workload(samples, 512, overlap=overlap)


def layout(servers: int, training: int, *idle: IdleServers) -> Layout:
    buckets = (PlannedBucket(8, servers, 20_000, 128),) if servers else ()
    return Layout(buckets, training, idle=idle)


def beside(number: int = 2, memory: float = WHOLE) -> IdleServers:
    return IdleServers(8, number, 128, memory, WHOLE)


def search(workload: Workload) -> Search:
    return Search(PROFILE, workload, 40, PlannerSettings())


@settings(max_examples=15, deadline=None)
@given(mean=st.floats(500, 6000), memory=st.floats(0.3, WHOLE), number=st.integers(1, 2))
def test_they_are_worth_the_share_of_a_step_in_which_the_trainer_waits(
    mean: float, memory: float, number: int
) -> None:
    found = search(work(mean))
    alone, always = found.times(layout(2, 16)), found.times(layout(2 + number, 16))
    shared = layout(2, 16, beside(number, memory))
    times = found.times(shared)
    assert always.rollout_s * (1 - 1e-9) <= times.rollout_s <= alone.rollout_s * (1 + 1e-9)
    (bucket,) = found.serving(shared, times.train_s)
    waits = 1 - times.train_s / times.step_s
    assert bucket.beside <= number * max(0.0, waits) + 0.02


def test_the_longer_training_takes_the_less_they_are_worth() -> None:
    found, shared = search(work()), layout(2, 16, beside())
    worth = [found.serving(shared, train_s)[0].beside for train_s in (0.0, 20.0, 60.0, 1e6)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > 1.5
    assert worth[-1] == 0.0


def test_a_smaller_cache_is_worth_less_and_one_too_small_nothing() -> None:
    found = search(work(6000))
    whole, part, none = (
        found.serving(layout(2, 16, beside(2, memory)), 10.0)[0].beside
        for memory in (WHOLE, 0.15, 0.095)
    )
    assert whole > part > none == 0.0


def test_where_halves_take_turns_they_play_all_the_time() -> None:
    found = search(work(overlap=1.0))
    shared = found.times(layout(2, 16, beside()))
    assert shared.in_turn
    assert shared.rollout_s == pytest.approx(found.times(layout(4, 16)).rollout_s, rel=0.01)


def test_without_other_servers_the_halves_take_turns() -> None:
    found = search(work())
    shared = found.times(layout(0, 16, beside()))
    assert shared.step_s == pytest.approx(shared.rollout_s + shared.train_s)


def test_ranks_with_less_memory_share_a_replica_over_the_network() -> None:
    training = replace(PROFILE.training, network_bandwidth=1e8)
    found = Search(replace(PROFILE, training=training), work(), 40, PlannerSettings())
    roomy, tight = (
        found.train_s(layout(2, 16, IdleServers(8, 2, 128, 0.2, ranks))) for ranks in (0.9, 0.6)
    )
    assert roomy == found.train_s(layout(2, 16))
    assert tight > 2 * roomy


def test_shares_hold_the_ranks_and_the_longest_trajectory() -> None:
    found = shares_that_fit(PROFILE, 8, 12, 20_000)
    assert found is not None
    facts = PROFILE.facts
    ranks = PROFILE.training.within(found.train)
    assert found.train * facts.gpu_gib >= ranks.memory_gib(12, 20_000)
    assert found.rollout + found.train <= WHOLE + 1e-9
    law = PROFILE.sharing(8, found.rollout)
    assert law is not None
    assert CONTEXTS * 20_000 <= law.kv_tokens < PROFILE.servers[8].kv_tokens
    assert shares_that_fit(PROFILE, 8, 8, 25_000) is None, "a replica on eight leaves too little"
    assert shares_that_fit(PROFILE, 8, 16, 25_000) is not None, "one on all sixteen does not"
    assert shares_that_fit(PROFILE, 8, 8, 40_000) is None, "the ranks leave nothing"
    unknown = replace(PROFILE.training, facts=replace(facts, gpu_gib=1e9))
    assert shares_that_fit(replace(PROFILE, training=unknown), 8, 16, 20_000) is None


def test_a_recipe_s_plan_knows_which_of_its_servers_wait_for_the_trainer() -> None:
    share = {"rollout": 0.3, "train": 0.6, "serve": "when-idle"}
    recipe = Recipe.model_validate(
        {
            "nodes": [
                {"host": "a", "gpus": 8, "share": share},
                {"host": "b", "gpus": 8, "pool": "rollout"},
                {"host": "c", "gpus": 8, "share": share},
            ],
            "model": {"path": "/m"},
            "rollout": {"buckets": [{"name": "all", "tensor_parallel": 8, "max_num_seqs": 64}]},
        }
    )
    found = RecipePlacement(recipe).layout_of(initial_plan(recipe), slots_of(recipe))
    assert (found.rollout_gpus, found.training_gpus, found.servers) == (8, 16, {8: 1})
    assert found.idle == (IdleServers(8, 2, 64, 0.3, 0.6),)
    assert str(found).endswith("training 16, 2 x TP 8 there while it waits")
