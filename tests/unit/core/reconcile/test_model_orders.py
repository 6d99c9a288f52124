"""Slots that are ordered to serve a frozen model, and that go back to what they did."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from libra_cli.config.errors import RecipeError
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.reconcile.manual_plan import OrderRefused
from libra_cli.core.reconcile.model_orders import ordered_models
from libra_cli.core.records import MoveRecord, PlanRecord, SlotRecord
from libra_cli.core.types import Plan, Role
from tests.world import Faults, World, recipe


def served(**more: Any) -> Recipe:
    """Three slots may change sides, one serves the policy, one trains, and one has a judge."""
    changes: dict[str, Any] = {
        "nodes": [
            {"host": "a", "slots": 2, "pool": "hybrid"},
            {"host": "b", "slots": 3, "pool": ["rollout", "hybrid", "models"]},
            {"host": "c", "pool": "train"},
        ],
        "environment": {"name": "m:E", "args": {"judge": {"served": "judge"}}},
        "models": [{"name": "judge", "path": "/judge", "max_slots": 3}],
        "planner": {"kind": "fixed"},
    }
    return recipe(**(changes | more))


def asked(
    made: Recipe, number: int, today: Plan | None = None, pinned: Sequence[str] = ()
) -> dict[str, str]:
    pins = dict.fromkeys(pinned, Role.ROLLOUT)
    return ordered_models(
        made.models, slots_of(made), today or initial_plan(made), {"judge": number}, pins
    )


def test_further_servers_take_the_last_slots_that_serve_the_policy_and_may() -> None:
    made = served()
    assert asked(made, 1) == {}
    assert asked(made, 2) == {"b/1": "judge"}
    assert asked(made, 3) == {"b/1": "judge", "a/1": "judge"}
    assert asked(made, 2, pinned=["b/1"]) == {"a/1": "judge"}


def test_those_that_serve_it_stay_and_the_last_goes_first() -> None:
    made = served()
    plan = initial_plan(made)
    today = Plan(plan.servers, plan.train, models=(("b/1", "judge"), ("a/1", "judge")))
    assert asked(made, 3, today) == dict(today.models)
    assert asked(made, 2, today) == {"b/1": "judge"}
    assert ordered_models(made.models, slots_of(made), today, {}, {}) == dict(today.models)


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ({"jury": 2}, "there is no model 'jury'; the run serves judge"),
        ({"judge": 0}, "it has 1 to 3 servers"),
        ({"judge": 4}, "it has 1 to 3 servers"),
    ],
)
def test_what_a_recipe_does_not_allow_is_refused(to: dict[str, int], said: str) -> None:
    made = served()
    with pytest.raises(OrderRefused, match=said):
        ordered_models(made.models, slots_of(made), initial_plan(made), to, {})


def test_slots_that_train_or_are_pinned_are_not_taken() -> None:
    with pytest.raises(OrderRefused, match="needs slots of the pool auto that serve the policy"):
        asked(served(), 2, pinned=["a/0", "a/1", "b/1"])


def test_a_pinned_slot_is_not_taken_back() -> None:
    made = served()
    plan = initial_plan(made)
    today = Plan(plan.servers, plan.train, models=(("b/1", "judge"),))
    with pytest.raises(OrderRefused, match="gives some back, and too few are not pinned"):
        asked(made, 1, today, pinned=["b/1"])


@pytest.mark.parametrize("name", ["rollout", "train", "gradient"])
def test_no_model_is_called_like_a_role(name: str) -> None:
    with pytest.raises((RecipeError, ValueError), match="the name of a role"):
        served(
            environment={"name": "m:E", "args": {"judge": {"served": name}}},
            models=[{"name": name, "path": "/judge"}],
        )


@pytest.mark.parametrize(
    ("models", "nodes", "said"),
    [
        ({"slots": 1, "max_slots": 0}, None, "max_slots"),
        ({"slots": 2, "max_slots": 1}, ["rollout", "models", "models"], "slots is 2"),
        ({"max_slots": 2}, ["rollout", "rollout", "models"], "no slot is of the pool auto"),
    ],
)
def test_a_recipe_says_how_many_there_may_be(
    models: dict[str, Any], nodes: list[str] | None, said: str
) -> None:
    pools = nodes or ["rollout", "hybrid", "models"]
    with pytest.raises((RecipeError, ValueError), match=said):
        served(
            nodes=[
                {"host": "b", "slots": 3, "pool": pools},
                {"host": "c", "pool": "train"},
            ],
            models=[{"name": "judge", "path": "/judge", **models}],
        )


def until(world: World, met: Any) -> None:
    for _ in range(4000):
        if met():
            return
        world.play(world.events + 1)
    raise AssertionError("it does not come")


def test_a_slot_is_moved_to_the_judge_and_back_while_the_run_goes_on() -> None:
    made = served(run={"name": "world", "steps": 60})
    world = World(Random(3), Faults(), made)

    def serving() -> list[str]:
        rows = {row.slot: row for row in world.rows(SlotRecord)}
        return sorted(row.slot for row in rows.values() if row.is_frozen and row.bucket == "judge")

    until(world, lambda: len(world.steps) == 2)
    world.give(e.PlanOrdered("one", models=(("judge", 2),)))
    assert world.answers[-1].text == "moving to rollout=2, gradient=0, train=2, 1 more for judge"
    until(world, lambda: serving() == ["b/1"])
    until(world, lambda: not world.machine.reconciler.moves)
    world.give(e.PlanOrdered("pin", pins=(("b/1", Role.ROLLOUT),)))
    assert world.answers[-1].text == "slot b/1 serves judge; --to judge=N takes it back"
    step = len(world.steps)
    world.give(e.PlanOrdered("two", models=(("judge", 1),)))
    assert world.answers[-1].accepted
    until(world, lambda: not world.machine.reconciler.moves and not serving())
    until(world, lambda: len(world.steps) > step + 1)
    rows = {row.slot: row for row in world.rows(SlotRecord)}
    assert (rows["b/1"].role, rows["b/1"].state) == ("rollout", "serving")
    moves = {row.move: row for row in world.rows(MoveRecord)}
    assert [(one.slot, one.from_role, one.to_role, one.state) for one in moves.values()] == [
        ("b/1", "rollout", "model", "done"),
        ("b/1", "model", "rollout", "done"),
    ]
    plans = {row.plan: row for row in world.rows(PlanRecord)}
    assert [row.models for row in plans.values()] == [(), (("b/1", "judge"),), ()]
    world.run()
    assert world.end == a.End("finished", "")


def test_a_server_that_does_not_start_gives_its_slot_back() -> None:
    world = World(Random(4), Faults(), served(run={"name": "world", "steps": 40}))
    until(world, lambda: len(world.steps) == 1)
    world.faults.start_fails = 1.0
    world.give(e.PlanOrdered("one", models=(("judge", 2),)))
    until(world, lambda: any(row.state == "failed" for row in world.rows(MoveRecord)))
    world.faults.start_fails = 0.0
    told = next(row for row in world.rows(MoveRecord) if row.state == "failed")
    assert told.detail == "no such directory; the slot is given back to rollout"
    assert world.machine.plan.models == ()
    world.run()
    assert world.end == a.End("finished", "")
