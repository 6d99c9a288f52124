"""How many slots the planner gives a frozen model that trajectories ask."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from libra_cli.app.costs import recipe_planner
from libra_cli.config.recipe import Recipe
from libra_cli.core.explanation import Constraint
from libra_cli.core.frozen.placement import neighbours
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.model_use import ModelDemand
from libra_cli.core.observation import Observation
from libra_cli.core.planning.planner import Decision
from libra_cli.core.types import Plan, Role
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile

A800 = load_profile("a800-qwen3-8b")
ROOMY = replace(A800.training, facts=replace(A800.facts, gpu_gib=110.0))
PROFILE = replace(A800, training=ROOMY)
"""One GPU has the memory for a gradient worker."""
SAMPLES = (TrajectorySample(500, 400), TrajectorySample(500, 800))


def recipe(**changes: Any) -> Recipe:
    nodes = [
        {"host": "a", "gpus": 8, "slots": 8, "pool": "auto"},
        {"host": "b", "gpus": 8, "slots": 8, "pool": [*["auto"] * 7, "models"]},
    ]
    return Recipe.model_validate(
        {
            "nodes": nodes,
            "model": {"path": "/m"},
            "environment": {"name": "m:E", "args": {"judge": {"served": "judge"}}},
            "models": [{"name": "judge", "path": "/judge", "max_slots": 4}],
            **changes,
        }
    )


def decided(
    demand: ModelDemand | None, today: Plan | None = None, **seen: Any
) -> tuple[Decision, Plan]:
    made = recipe()
    plan = today or initial_plan(made)
    work = Workload(SAMPLES, 512, models=() if demand is None else (demand,))
    planner = recipe_planner(made, lambda plan, evidence: PROFILE, elastic=True)
    return planner.decide(Observation(9, plan, slots_of(made), work, **seen)), plan


def judges(plan: Plan) -> int:
    return Counter(dict(plan.models).values())["judge"]


SATURATED = ModelDemand("judge", 1.0, 400.0, 4000.0, busy=1.0)


def test_a_model_without_time_left_gets_slots_that_served_the_policy() -> None:
    decision, today = decided(SATURATED)
    assert decision.plan is not None
    assert judges(decision.plan) == 3  # 4 in all, the most
    given = {slot for slot, _ in decision.plan.models}
    assert given <= dict(today.servers).keys()
    assert not given & dict(decision.plan.servers).keys()
    assert decision.after.step_s < 0.3 * decision.before.step_s
    assert "4 x judge" in decision.layout
    told = decision.explanation
    assert told is not None
    assert told.binds_today.constraint is Constraint.MODELS
    assert "model judge" in str(told.binds_today)
    moved = {move.slot: move for move in decision.moves}
    assert {moved[slot].after for slot in given} == {"model judge"}
    assert all(moved[slot].seconds > 0 for slot in given)
    assert decision.cost_s > 0


def test_a_look_compares_one_more_or_fewer_and_doublings() -> None:
    start = initial_plan(recipe())
    slots = slots_of(recipe())
    (spec,) = recipe().models
    wide = spec.model_copy(update={"max_slots": 12})
    found = [len(one) for one in neighbours([wide], start, slots, ())]
    assert found == [0, 1, 3, 7]  # beside the judge's own
    served = tuple((slot, "judge") for slot, _ in start.servers[:2])
    found = [len(one) for one in neighbours([wide], replace(start, models=served), slots, ())]
    assert found == [2, 1, 3, 5]  # 11 are more than serve the policy


def test_one_that_is_idle_gives_its_slot_back() -> None:
    slot = dict(initial_plan(recipe()).servers).popitem()[0]
    start = initial_plan(recipe())
    today = replace(
        start,
        servers=tuple(one for one in start.servers if one[0] != slot),
        models=((slot, "judge"),),
    )
    idle = ModelDemand("judge", 2.0, 0.5, 0.6, busy=0.01)
    decision, _ = decided(idle, today)
    assert judges(decision.proposed) == 0


@pytest.mark.parametrize("demand", [None, ModelDemand("judge", 1.0, 0.1, 0.1, busy=0.01)])
def test_nobody_is_given_slots_without_need(demand: ModelDemand | None) -> None:
    decision, _ = decided(demand)
    assert judges(decision.proposed) == 0


def test_it_never_has_more_than_the_recipe_allows_nor_pinned_ones() -> None:
    start = initial_plan(recipe())
    most = dict.fromkeys([slot for slot, _ in start.servers][-3:], "judge")
    today = replace(
        start,
        servers=tuple(one for one in start.servers if one[0] not in most),
        models=tuple(most.items()),
    )
    hungry = replace(SATURATED, servers=4.0, busy_s=4000.0)
    assert judges(decided(hungry, today)[0].proposed) == 3
    pins = tuple((slot, Role.ROLLOUT) for slot, _ in start.servers)
    assert judges(decided(SATURATED, pins=pins)[0].proposed) == 0
