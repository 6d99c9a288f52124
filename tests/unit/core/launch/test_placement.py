"""How many slots train to begin with, where the recipe leaves it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import PlanError, initial_plan, slots_of
from libra_cli.core.launch.process import dtype_of
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


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        (["auto"] * 5, "2 of 5 slots train to begin with, a third of them, rounded up"),
        (
            ["train", "auto", "auto", "auto"],
            (
                "2 of 4 slots train to begin with, a third of them, rounded up; "
                "1 by the recipe's pools"
            ),
        ),
        (["train", "auto"], "1 of 2 slots trains to begin with, as the pools of the recipe say"),
        (
            ["rollout", "rollout", "rollout", "rollout", "auto"],
            (
                "1 of 5 slots trains to begin with, "
                "as near to a third of them as pools and nodes allow"
            ),
        ),
        (["rollout", "train"], "the pools of the recipe give 1 slot to training"),
    ],
)
def test_a_first_plan_says_why_so_many_slots_train(pools: list[str], told: str):
    node = {"host": "a", "slots": len(pools), "pool": pools}
    assert initial_plan(world.recipe(nodes=[node])).reasons[0] == told


def test_a_host_that_only_plays_has_no_slots_and_leaves_open_nodes_open():
    players = {"host": "p", "pool": "environments"}
    workers = {"environment": {"workers": {"processes": 2, "nodes": ["p"]}}}
    cut = world.recipe(nodes=[{"host": "a", "slots": 2}, players], **workers)
    assert [slot.id for slot in slots_of(cut)] == ["a/0", "a/1"]
    left_open = world.recipe(nodes=[{"host": "a", "gpus": 4}, players], **workers)
    assert left_open.has_open_nodes
    assert {slot.node for slot in slots_of(left_open)} == {"a"}


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ([{"host": "a", "gpus": 2, "slots": 1, "pool": "rollout"}], "1 slot with 2 GPUs"),
        (
            [
                {"host": "a", "gpus": 4, "slots": 2, "pool": "rollout"},
                {"host": "b", "gpus": 3, "slots": 1, "pool": "rollout"},
            ],
            "2 slots with 2 GPUs, 1 slot with 3 GPUs",
        ),
    ],
)
def test_a_bucket_that_finds_no_slots_says_which_are_left(nodes: list[Any], left: str):
    every = [*nodes, {"host": "t", "gpus": 1, "pool": "train"}]
    with pytest.raises(PlanError, match=f"but there are 0; left over: {left}"):
        initial_plan(world.recipe(nodes=every))


@pytest.mark.parametrize(
    ("gpus", "least", "advice"),
    [
        (1, 1, r"have both share it: nodes\[\]\.share: \{rollout: 0\.3, train: 0\.6\}"),
        (2, 1, "give more"),
        (2, 2, r"give more, or lower planner\.min_rollout"),
    ],
)
def test_too_few_gpus_are_refused_with_what_makes_room(gpus: int, least: int, advice: str):
    degree = {"buckets": [{"name": "all", "tensor_parallel": gpus}]}
    nodes = [{"host": "a", "gpus": gpus}]
    recipe = world.recipe(nodes=nodes, rollout=degree, planner={"min_rollout": least})
    with pytest.raises(PlanError, match=rf"too few for a trainer and .* \({advice}\)"):
        initial_plan(recipe)


def test_several_buckets_leave_no_slots_for_the_last():
    nodes = [{"host": "a", "slots": 1, "pool": "rollout"}, {"host": "t", "pool": "train"}]
    one = {"tensor_parallel": 1, "slots": 1}
    buckets = [{"name": "first", **one}, {"name": "second", **one}]
    with pytest.raises(PlanError, match=r"'second' needs 1 rollout slot .* left over: no slots"):
        initial_plan(world.recipe(nodes=nodes, rollout={"buckets": buckets}))


def test_a_slot_that_only_serves_has_nothing_to_do_beside_demonstrations(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    recipe = Recipe.model_validate(
        {
            "nodes": [{"host": "a", "slots": 2, "pool": ["train", "rollout"]}],
            "model": {"path": "/model"},
            "demonstrations": [{"path": str(rows)}],
        }
    )
    with pytest.raises(PlanError, match="leave nothing to do for slot a/1"):
        initial_plan(recipe)


@pytest.mark.parametrize(("gpus", "dtype"), [((2, 1), "bfloat16"), ((2, 0), "float32")])
def test_numbers_are_bfloat16_where_every_slot_has_gpus(gpus: tuple[int, ...], dtype: str):
    nodes = [
        {"host": f"h{index}", "gpus": number, "slots": 1, "pool": "train"}
        for index, number in enumerate(gpus)
    ]
    recipe = world.recipe(nodes=nodes)
    assert dtype_of(recipe.model, slots_of(recipe)) == dtype
