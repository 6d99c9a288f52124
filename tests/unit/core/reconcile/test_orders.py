"""A split asked for by hand: what is carried out, and why the rest is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.reconcile.manual_plan import OrderRefused, ordered_plan
from libra_cli.core.records import DecisionRecord
from libra_cli.core.types import Plan, Prediction, Role
from tests.elastic import Scene, scene

B1 = "b/1"


def test_slots_that_already_do_what_is_asked_stay():
    world = scene()
    answer = world.order(gradient=1)
    assert answer.accepted
    assert answer.text == "moving to rollout=2, gradient=1, train=2"
    assert set(world.machine.reconciler.moves) == {B1}


def test_an_order_while_slots_move_is_refused_with_their_names():
    world = scene()
    world.order(gradient=2)
    moving = ", ".join(sorted(world.machine.reconciler.moves))
    answer = world.order(gradient=1)
    assert not answer.accepted
    assert answer.text == f"slots are moving ({moving}); order again when they have arrived"


def test_an_order_while_the_planner_looks_is_refused():
    world = scene()
    world.silent = lambda event: isinstance(event, (e.PlanKept, e.PlanChosen))
    world.give(e.PlanOrdered("look"))
    assert not world.answers
    assert "the planner looks" in world.order(gradient=1).text


def test_the_last_rollout_server_cannot_be_ordered_away():
    world = scene()
    answer = world.order(rollout=0, gradient=3)
    assert not answer.accepted
    assert "planner.min_rollout is 1" in answer.text
    assert not world.machine.reconciler.moves


def test_a_split_that_is_todays_moves_nothing():
    world = scene()
    assert world.order(rollout=3, train=2).text == "nothing has to move"
    assert not world.machine.reconciler.moves


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ({"rollout": 9}, "rollout=9, gradient=-6, train=2 are 5 slots, and the run has 5"),
        ({"rollout": 1, "gradient": 1, "train": 1}, "are 3 slots, and the run has 5"),
        ({"train": 0}, "train=0 is asked for, and pools and pins hold 1 slots there"),
        ({"idle": 1}, "slots cannot be ordered to be idle; they can be train, gradient, rollout"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(to, why):
    world = scene()
    answer = world.order(**to)
    assert not answer.accepted
    assert why in answer.text
    assert not world.machine.reconciler.moves


def test_a_trainer_on_uneven_nodes_can_be_ordered():
    world = scene()
    assert world.order(train=4).accepted


def test_a_slot_that_does_not_exist_is_refused_with_those_that_do():
    answer = scene().order(("x/7", Role.ROLLOUT))
    assert not answer.accepted
    assert answer.text == "there is no slot x/7; the run has a/0, a/1, b/0, b/1, c/0"


def test_a_pin_against_the_pool_of_a_slot_is_refused():
    answer = scene().order(("c/0", Role.ROLLOUT))
    assert answer.text == "slot c/0 is of pool train: it cannot be pinned to rollout"


def test_a_slot_cannot_be_pinned_to_do_nothing():
    answer = scene().order((B1, Role.IDLE))
    assert answer.text == "slot b/1 cannot be pinned to idle; it can to train, gradient, rollout"


def test_the_slot_with_the_cores_first_rank_stays():
    world = scene()
    slots = slots_of(world.recipe)
    roles = {slot.id: world.machine.reconciler.role_of(slot.id) for slot in slots}
    with pytest.raises(OrderRefused, match="publishes the weights: it stays on a"):
        ordered_plan(world.recipe, slots, roles, ("a/0", "c/0"), {Role.TRAIN: 1}, {})


def test_a_slot_that_does_nothing_is_given_what_is_missing():
    world = scene()
    slots = slots_of(world.recipe)
    roles = {slot.id: world.machine.reconciler.role_of(slot.id) for slot in slots}
    roles[B1] = Role.IDLE
    plan = ordered_plan(world.recipe, slots, roles, ("c/0", "a/0"), {Role.GRADIENT: 1}, {})
    assert plan.gradient == (B1,)
    assert {slot for slot, _ in plan.servers} == {"a/1", "b/0"}


def test_a_pin_decides_which_slot_moves():
    world = scene()
    world.order(("a/1", Role.GRADIENT))
    assert set(world.machine.reconciler.moves) == {"a/1"}
    world.arrive()
    assert world.moved("a/1").state == "done"


def test_pins_survive_later_orders_and_reach_the_planner():
    world = scene()
    world.order((B1, Role.ROLLOUT))
    world.order(gradient=1)
    assert set(world.machine.reconciler.moves) == {"b/0"}
    world.arrive()
    world.give(e.PlanOrdered("look"))
    asked = world.did(a.Propose)[-1]
    assert (asked.why, asked.order) == ("asked for", "look")
    assert asked.observation.pins == ((B1, Role.ROLLOUT),)


def test_a_pin_is_let_go():
    world = scene()
    world.order((B1, Role.ROLLOUT))
    world.order((B1, None))
    world.order(gradient=1)
    assert set(world.machine.reconciler.moves) == {B1}


def test_an_order_against_its_own_pins_is_refused_and_pins_nothing():
    world = scene()
    answer = world.order(*((slot, Role.ROLLOUT) for slot in ("a/1", "b/0", B1)), rollout=2)
    assert not answer.accepted
    assert "rollout=2 is asked for, and pools and pins hold 3 slots there" in answer.text
    assert not world.machine.controller.pins


def test_a_plan_that_moves_a_pinned_slot_is_not_carried_out():
    world = scene()
    world.order((B1, Role.ROLLOUT))
    plan = world.machine.plan
    servers = tuple((slot, bucket) for slot, bucket in plan.servers if slot != B1)
    world.choose(Plan(servers, plan.train, gradient=(B1,)))
    assert not world.machine.reconciler.moves
    assert world.machine.reconciler.role_of(B1) is Role.ROLLOUT


def gives_up_b(world: Scene) -> None:
    world.give(e.NodeLost("b", "cable"))
    world.give(e.NodeGone("b", "its lease has run out"))


def test_an_order_moves_slots_of_other_nodes_than_one_that_is_given_up():
    world = scene()
    gives_up_b(world)
    assert world.order(gradient=1).accepted
    assert set(world.machine.reconciler.moves) == {"a/1"}


def test_an_order_for_a_slot_of_a_node_that_is_given_up_is_refused_until_it_is_back():
    world = scene()
    gives_up_b(world)
    answer = world.order((B1, Role.GRADIENT))
    assert not answer.accepted
    assert answer.text == "b/1 cannot move before b is back, which is given up"
    world.give(e.NodeBack("b", frozenset()))
    assert world.order((B1, Role.GRADIENT)).accepted


def test_the_planner_leaves_slots_of_a_node_that_is_given_up_as_they_are():
    world = scene()
    gives_up_b(world)
    world.steps_on(1)
    world.give(e.PlanOrdered("look"))
    asked = world.did(a.Propose)[-1].observation
    assert asked.pins == (("b/0", Role.ROLLOUT), (B1, Role.ROLLOUT))
    assert asked.gone == {"b"}
    plan = asked.plan
    servers = tuple((slot, bucket) for slot, bucket in plan.servers if slot != B1)
    world.choose(replace(plan, servers=servers, gradient=(B1,)))
    assert not world.machine.reconciler.moves
    assert world.rows(DecisionRecord)[-1].why_not.startswith("b/1 cannot move")


def test_a_planners_answer_with_todays_plan_moves_nothing():
    world = scene()
    world.silent = lambda event: isinstance(event, (e.PlanKept, e.PlanChosen))
    world.give(e.PlanOrdered("look"))
    plan = world.machine.plan
    world.give(e.PlanChosen(plan, world._slots, Prediction(2.0, 1.0, 5.0), "look"))
    assert world.answers[-1] == a.AnswerOrder("look", True, "the plan is today's already")
    assert not world.machine.reconciler.moves
    world.answers.clear()
    assert world.order(gradient=1).accepted, "nobody looks any more"
