"""The first plan keeps the split of the recipe, or says with both numbers why it cannot."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import PlanError, initial_plan, slots_of
from libra_cli.core.launch.trainer_backend import ranks_per_node
from libra_cli.core.types import Pool, Slot


def recipe_of(*nodes: dict[str, Any], buckets: list[dict[str, Any]] | None = None) -> Recipe:
    rollout = {"buckets": buckets} if buckets else {}
    return Recipe.model_validate({"nodes": nodes, "model": {"path": "/m"}, "rollout": rollout})


def test_a_node_is_one_slot_with_all_its_gpus_unless_split() -> None:
    slots = slots_of(recipe_of({"host": "a", "gpus": 4}, {"host": "b", "gpus": 4, "slots": 2}))
    assert [(slot.id, slot.gpus) for slot in slots] == [
        ("a/0", (0, 1, 2, 3)),
        ("b/0", (0, 1)),
        ("b/1", (2, 3)),
    ]
    assert {slot.pool for slot in slots} == {Pool.HYBRID}


def test_the_pools_of_the_recipe_are_kept() -> None:
    plan = initial_plan(
        recipe_of({"host": "local", "slots": 3, "pool": ["rollout", "train", "rollout"]})
    )
    assert plan.train == ("local/1",)
    assert [slot for slot, _ in plan.servers] == ["local/0", "local/2"]
    assert plan.reasons


@pytest.mark.parametrize(("slots", "train"), [(2, 1), (3, 1), (4, 2), (6, 2), (7, 3), (9, 3)])
def test_a_third_of_free_slots_trains_rounded_up(slots: int, train: int) -> None:
    plan = initial_plan(recipe_of({"host": "local", "slots": slots}))
    assert plan.train == tuple(f"local/{index}" for index in range(train))


def test_pools_that_are_given_count_toward_the_third() -> None:
    nodes = [{"host": f"n{index}"} for index in range(6)]
    nodes[5]["pool"] = "train"
    assert initial_plan(recipe_of(*nodes)).train == ("n0/0", "n5/0")


def test_free_slots_take_the_half_nobody_has() -> None:
    plan = initial_plan(recipe_of({"host": "a", "slots": 3, "pool": "train"}, {"host": "b"}))
    assert plan.train == ("a/0", "a/1", "a/2")
    plan = initial_plan(recipe_of({"host": "a", "slots": 3, "pool": "rollout"}, {"host": "b"}))
    assert plan.train == ("b/0",)


def test_every_train_node_gets_the_same_number_of_processes() -> None:
    """A third of 12 is 4: all of node a and one of b, which could not be replicas of each other."""
    nodes = [{"host": name, "slots": 3} for name in "abcd"]
    plan = initial_plan(recipe_of(*nodes))
    assert plan.train == ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2")


def test_fewer_slots_train_when_more_would_leave_nobody_to_serve() -> None:
    plan = initial_plan(recipe_of({"host": "a"}, {"host": "b", "slots": 3}))
    assert plan.train == ("a/0", "b/0")
    plan = initial_plan(recipe_of({"host": "a", "slots": 2}, {"host": "b", "slots": 2}))
    assert plan.train == ("a/0", "a/1")
    plan = initial_plan(
        recipe_of({"host": "a", "slots": 2}, {"host": "b"}, {"host": "c", "pool": "train"})
    )
    assert plan.train == ("a/0", "c/0")


def test_buckets_with_a_count_are_filled_first() -> None:
    plan = initial_plan(
        recipe_of(
            {"host": "a", "gpus": 2, "pool": "train"},
            {"host": "b", "gpus": 8, "slots": 4, "pool": "rollout"},
            buckets=[
                {"name": "short", "tensor_parallel": 2, "up_to_tokens": 128},
                {"name": "long", "tensor_parallel": 2, "slots": 1, "max_num_seqs": 8},
            ],
        )
    )
    assert [(slot, bucket.name) for slot, bucket in plan.servers] == [
        ("b/0", "long"),
        ("b/1", "short"),
        ("b/2", "short"),
        ("b/3", "short"),
    ]
    by_name = {bucket.name: bucket for _, bucket in plan.servers}
    assert by_name["short"].up_to_tokens == 128
    assert by_name["long"].up_to_tokens == 1024
    assert by_name["long"].max_num_seqs == 8


def test_a_bucket_takes_only_slots_of_its_shape() -> None:
    plan = initial_plan(
        recipe_of(
            {"host": "a", "gpus": 8, "pool": "train"},
            {"host": "b", "gpus": 8, "slots": 4, "pool": "rollout"},
            {"host": "c", "gpus": 8, "pool": "rollout"},
            buckets=[
                {"name": "short", "tensor_parallel": 2},
                {"name": "long", "tensor_parallel": 8},
            ],
        )
    )
    assert Counter(bucket.name for _, bucket in plan.servers) == {"short": 4, "long": 1}
    assert dict(plan.servers)["c/0"].name == "long"


def test_gpus_and_none_cannot_train_together() -> None:
    with pytest.raises(PlanError, match="cannot form one world"):
        initial_plan(
            recipe_of(
                {"host": "a", "gpus": 1, "pool": "train"},
                {"host": "b", "pool": "train"},
                {"host": "c", "pool": "rollout"},
            )
        )


def test_trainer_processes_are_one_a_gpu_or_one_a_slot() -> None:
    slots = slots_of(recipe_of({"host": "a", "gpus": 4, "slots": 2}, {"host": "b", "slots": 3}))
    train = [slot for slot in slots if slot.id in {"a/1", "b/0", "b/2"}]
    assert ranks_per_node(train) == {"a": 2, "b": 2}


_NODES = st.lists(
    st.integers(1, 4).flatmap(
        lambda slots: st.fixed_dictionaries(
            {
                "slots": st.just(slots),
                "gpus": st.sampled_from([0, slots, 2 * slots]),
                "pool": st.lists(
                    st.sampled_from(["rollout", "train", "hybrid", "auto"]),
                    min_size=slots,
                    max_size=slots,
                ),
            }
        )
    ),
    min_size=1,
    max_size=5,
)


@given(nodes=_NODES)
def test_a_plan_gives_every_slot_one_role_or_there_is_a_reason(nodes: list[dict[str, Any]]) -> None:
    named = [{"host": f"n{index}", **node} for index, node in enumerate(nodes)]
    shapes = [{"name": f"tp{degree}", "tensor_parallel": degree} for degree in (1, 2)]
    for buckets in (shapes, shapes[:1], shapes[1:]):
        recipe = recipe_of(*named, buckets=buckets)
        try:
            plan = initial_plan(recipe)
        except PlanError:
            continue
        slots = {slot.id: slot for slot in slots_of(recipe)}
        assert sorted([*plan.train, *(slot for slot, _ in plan.servers)]) == sorted(slots)
        assert plan.train
        assert plan.servers
        assert all(slots[slot].pool is not Pool.ROLLOUT for slot in plan.train)
        assert all(slots[slot].pool is not Pool.TRAIN for slot, _ in plan.servers)
        assert all(max(len(slots[s].gpus), 1) == b.tensor_parallel for s, b in plan.servers)
        fixed = [slot for slot in slots.values() if slot.pool is Pool.TRAIN]
        free = [slot for slot in slots.values() if slot.pool is Pool.HYBRID]
        most = len(free) - (len(fixed) + len(free) == len(slots))
        worlds = [_ranks(*fixed, *free[:number]) for number in range(most + 1)]
        even = any(len(ranks) == 1 for ranks in worlds)
        assert len(_ranks(*(slots[slot] for slot in plan.train))) == 1 or not even


def _ranks(*train: Slot) -> set[int]:
    return set(ranks_per_node(train).values())
