"""Servers of a node that become one larger server, and are split again, while the others serve."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.reconcile.manual_plan import OrderRefused, ordered_plan
from libra_cli.core.records import MoveRecord, TurnRecord
from libra_cli.core.types import Role, Slot
from tests.elastic import Scene, of
from tests.world import recipe

S = ReplicaState
GRADIENT = Role.GRADIENT
B0, B1, BOTH = "b/0", "b/1", "b/0+1"
BUCKETS = [
    {"name": "small", "max_num_seqs": 3},
    {"name": "large", "tensor_parallel": 2, "max_num_seqs": 6, "slots": 0},
]


def scene(
    *,
    gpus: bool = True,
    hosts: str = "ab",
    pool: Any = "hybrid",
    head_gpus: int = 1,
    **sections: Any,
) -> Scene:
    """Two servers on each host, all serving, and a trainer."""
    nodes = [
        {"host": host, "slots": 2, "pool": pool, **({"gpus": 2} if gpus else {})} for host in hosts
    ]
    head = {"host": "c", "pool": "train", **({"gpus": head_gpus} if gpus else {})}
    world = Scene(
        Random(0),
        recipe=recipe(
            run={"name": "world", "steps": 1000},
            nodes=[head, *nodes],
            rollout={"buckets": BUCKETS},
            planner={"kind": "fixed"},
            **sections,
        ),
    )
    world.later(e.RunStarted())
    replicas = world.machine.servers.replicas
    world.until(lambda: all(server.state is S.SERVING for server in replicas.values()))
    world.steps_on(1)
    return world


def shape(world: Scene, **shapes: bool) -> a.AnswerOrder:
    return order(world, {BOTH: shapes["joined"]})


def order(world: Scene, shapes: dict[str, bool]) -> a.AnswerOrder:
    number = f"order-{len(world.answers)}"
    world.give(e.PlanOrdered(number, shapes=tuple(shapes.items())))
    return world.answers[-1]


def next_event(world: Scene) -> None:
    seen = world.events
    world.until(lambda: world.events > seen)


def serving(world: Scene) -> set[str]:
    return {slot for slot, s in world.machine.servers.replicas.items() if s.state is S.SERVING}


def existing(world: Scene) -> list[str]:
    return [slot.id for slot in world.machine.reconciler.slots]


@pytest.fixture(params=[True, False], ids=["GPUs", "no GPUs"])
def world(request) -> Scene:
    made = scene(gpus=request.param, pool="rollout")
    assert serving(made) == {"a/0", "a/1", B0, B1}
    return made


def test_two_servers_become_one_and_two_again(world):
    assert shape(world, joined=True).accepted
    world.arrive()
    assert serving(world) == {"a/0", "a/1", BOTH}
    assert existing(world) == ["c/0", "a/0", "a/1", BOTH]
    joined = world.machine.servers.replicas[BOTH]
    assert (joined.bucket.name, joined.bucket.max_num_seqs) == ("large", 6)
    assert joined.slot.num_devices == 2
    assert shape(world, joined=False).accepted
    world.arrive()
    assert serving(world) == {"a/0", "a/1", B0, B1}
    assert existing(world) == ["c/0", "a/0", "a/1", B0, B1]


def test_a_joined_slot_has_the_devices_of_its_parts():

    joined = joined_slot(scene(gpus=True, pool="rollout"))
    assert (joined.gpus, joined.parts) == ((0, 1), (0, 1))
    assert joined_slot(scene(gpus=False, pool="rollout")).gpus == ()


def joined_slot(world: Scene) -> Slot:
    shape(world, joined=True)
    return world.machine.reconciler.slots[-1]


def test_the_parts_are_free_before_the_larger_server_starts(world):
    shape(world, joined=True)
    world.until(lambda: world.move(BOTH).phase is not None)
    replicas = world.machine.servers.replicas
    assert [replicas[slot].state for slot in (B0, B1, BOTH)] == [S.IDLE, S.IDLE, S.STARTING]
    world.arrive()
    assert [world.phases(slot) for slot in (B0, B1)] == [["drain", "stop", "join"]] * 2
    assert world.phases(BOTH) == ["start", "sync", "verify", "join"]


def test_moves_tell_what_was_joined_and_split(world):
    shape(world, joined=True)
    world.arrive()
    told = {row.slot: row for row in world.rows(MoveRecord)}
    ways = {slot: (row.from_role, row.to_role, row.state) for slot, row in told.items()}
    assert ways == {
        B0: ("rollout", "idle", "done"),
        B1: ("rollout", "idle", "done"),
        BOTH: ("idle", "rollout", "done"),
    }
    assert told[BOTH].detail == "instead of b/0, b/1"
    assert told[B0].detail == "makes way for b/0+1"
    shape(world, joined=False)
    world.arrive()
    assert world.moved(BOTH).detail == "makes way for b/0, b/1"
    assert world.moved(B1).detail == "instead of b/0+1"


def test_the_others_serve_all_the_while_and_nothing_is_lost(world):
    began = world.now
    for joined in (True, False):
        shape(world, joined=joined)
        while world.machine.reconciler.moves:
            assert {"a/0", "a/1"} <= serving(world)
            next_event(world)
    world.steps_on(3)
    stopped = {action.slot for action in world.did(a.StopServer)}
    assert stopped == {B0, B1, BOTH}
    lost = [row for row in world.trajectories if row.state == "failed"]
    assert lost == []
    turns = [row for row in world.rows(TurnRecord) if row.ended_at > began]
    played: dict[tuple[int, int, int], list[TurnRecord]] = {}
    for row in turns:
        played.setdefault((row.group_id, row.member, row.attempt), []).append(row)
    assert any(row.moved_from in (B0, B1, BOTH) for row in turns), "trajectories went on elsewhere"
    assert all(
        after.prompt_tokens >= before.prompt_tokens + before.generated_tokens
        for rows in played.values()
        for before, after in pairwise(rows)
    )


def test_where_nobody_else_serves_one_part_serves_until_the_other_is_free():
    world = scene(hosts="b", pool="rollout")
    shape(world, joined=True)
    states = world.machine.servers.replicas
    while states[B0].up:
        assert states[B1].state is S.SERVING
        next_event(world)
    world.arrive()
    assert serving(world) == {BOTH}


def test_of_servers_that_go_the_one_whose_gpus_are_not_needed_serves_until_another_does():
    world = scene(hosts="ab")
    shape(world, joined=True)
    world.arrive()
    joined = world.machine.plan
    shape(world, joined=False)
    world.arrive()
    plan = world.machine.plan
    world.choose(replace(plan, servers=tuple(one for one in plan.servers if one[0] != "a/0")))
    world.arrive()
    assert serving(world) == {"a/1", B0, B1}
    large = tuple(one for one in joined.servers if one[0] == BOTH)
    slots = (*(slot for slot in world.machine.reconciler.slots if slot.node != "b"),)
    wide = replace(world.machine.reconciler.slots[-1], id=BOTH, gpus=(0, 1))
    then = replace(plan, servers=large, gradient=("a/1",))
    world.give(e.PlanChosen(then, (*slots, wide)))
    while BOTH not in serving(world):
        assert "a/1" in serving(world)
        next_event(world)
    world.arrive()
    assert serving(world) == {BOTH}


def test_the_last_server_goes_where_what_comes_waits_for_the_core_and_the_core_for_it():
    world = scene(hosts="b", head_gpus=2)
    plan = world.machine.plan
    world.choose(replace(plan, servers=tuple(one for one in plan.servers if one[0] == B1)))
    world.arrive()
    assert serving(world) == {B1}
    b0, b1, core = sorted(world.machine.reconciler.slots, key=lambda slot: slot.id)
    left, right = (replace(core, id=f"c/{gpu}x1", gpus=(gpu,)) for gpu in (0, 1))
    left = replace(left, pool=b1.pool)
    then = replace(plan, servers=((left.id, dict(plan.servers)[B1]),), train=(right.id, B1))
    world.give(e.PlanChosen(then, (b0, b1, left, right)))
    assert world.machine.reconciler.moves
    world.arrive()
    assert serving(world) == {left.id}


# -- failures -------------------------------------------------------------------------------------


def test_parts_serve_again_where_the_larger_server_does_not_start(world):
    world.silent = of(e.ServerStarted, BOTH)
    shape(world, joined=True)
    world.until(lambda: world.move(BOTH).phase is not None)
    world.give(e.ServerFailed(BOTH, world.machine.servers.replicas[BOTH].incarnation, "no memory"))
    world.until(lambda: not world.machine.reconciler.moves)
    assert existing(world) == ["c/0", "a/0", "a/1", B0, B1]
    row = world.moved(BOTH)
    assert (row.state, row.detail) == ("failed", "b/0+1: no memory; there is b/0, b/1 again")
    world.until(lambda: serving(world) == {"a/0", "a/1", B0, B1})
    world.silent = lambda event: False
    assert shape(world, joined=True).accepted, "it may be tried again"
    world.arrive()
    assert serving(world) == {"a/0", "a/1", BOTH}


def test_the_larger_server_comes_back_where_one_of_the_smaller_does_not_start(world):
    shape(world, joined=True)
    world.arrive()
    world.silent = of(e.ServerStarted, B1)
    shape(world, joined=False)
    world.until(lambda: world.machine.servers.replicas[B1].state is S.STARTING)
    world.until(lambda: B0 in serving(world))
    world.give(e.ServerFailed(B1, world.machine.servers.replicas[B1].incarnation, "no memory"))
    world.until(lambda: serving(world) == {"a/0", "a/1", BOTH})
    assert existing(world) == ["c/0", "a/0", "a/1", BOTH]


def test_a_part_that_does_not_stop_keeps_its_slot(world):
    world.silent = of(e.ServerStopped, B0)
    shape(world, joined=True)
    world.until(lambda: world.move(B0).phase == "stop")
    world.time_is_up(B0)
    assert not world.machine.reconciler.moves
    assert world.moved(BOTH).state == "failed"
    world.speak()
    world.until(lambda: serving(world) == {"a/0", "a/1", B0, B1})


def test_a_joined_server_that_dies_is_started_again(world):
    shape(world, joined=True)
    world.arrive()
    joined = world.machine.servers.replicas[BOTH]
    world.give(e.ServerFailed(BOTH, joined.incarnation, "died"))
    world.until(lambda: BOTH in serving(world))
    assert joined.restarts == 1


def test_a_lost_node_keeps_its_joined_server_if_that_still_runs(world):
    shape(world, joined=True)
    world.arrive()
    joined = world.machine.servers.replicas[BOTH]
    world.give(e.NodeLost("b", "cable"))
    assert not joined.routable
    world.give(e.NodeBack("b", frozenset({"server-0-1"})))
    assert (joined.state, joined.routable) == (S.SERVING, True)
    world.give(e.NodeLost("b", "cable"))
    world.give(e.NodeBack("b", frozenset()))
    assert joined.state is S.STOPPING


def test_a_node_that_is_lost_while_its_slots_are_joined_goes_on_when_it_is_back(world):
    world.silent = of(e.ServerStopped, B1)
    shape(world, joined=True)
    world.until(lambda: world.move(B1).phase == "stop")
    world.give(e.NodeLost("b", "cable"))
    world.steps_on(1)
    world.give(e.NodeBack("b", frozenset()))
    world.speak()
    world.arrive()
    assert serving(world) == {"a/0", "a/1", BOTH}


# -- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"b/0": True}, "b/0 names no slots to join; write them like gpu-01/0+1"),
        ({"b/1+2": True}, "there is no slot b/2; the recipe has c/0, a/0, a/1, b/0, b/1"),
        ({"b/1+0": True}, "the slots of b/1+0 are not neighbours, in the order of their numbers"),
        ({"b/0+1": False}, "there is no joined slot b/0+1; the run has none"),
        ({"x/0+1": True}, "there is no slot x/0; the recipe has c/0, a/0, a/1, b/0, b/1"),
    ],
)
def test_an_order_of_slots_that_are_not_side_by_side_is_refused(shapes, why):
    answer = order(scene(pool="rollout"), shapes)
    assert (answer.accepted, answer.text) == (False, why)


def test_slots_of_unlike_pools_are_not_joined():
    world = scene(pool=["rollout", "hybrid"])
    answer = shape(world, joined=True)
    assert answer.text == "the slots of b/0+1 are of unlike pools: hybrid, rollout"


def test_a_pinned_slot_is_not_joined():
    world = scene(pool="rollout")
    world.order((B1, Role.ROLLOUT))
    answer = shape(world, joined=True)
    assert answer.text == "slot b/1 is pinned; --pin b/1=auto lets it go"


def test_slots_are_not_joined_while_slots_move():
    world = scene(pool="rollout")
    shape(world, joined=True)
    answer = order(world, {"a/0+1": True})
    assert answer.text.startswith("slots are moving (b/0, b/0+1, b/1)")


def test_a_slot_that_trains_is_not_joined():
    world = scene(pool="hybrid")
    train = world.machine.plan.train[-1]
    node = train.partition("/")[0]
    answer = order(world, {f"{node}/0+1": True})
    assert answer.text == f"slot {train} does not serve, and only servers change their size"


def test_without_a_bucket_of_that_size_slots_are_not_joined():
    world = scene(pool="rollout")
    only = (world.recipe.rollout.buckets or ())[:1]
    small = world.recipe.rollout.model_copy(update={"buckets": only})
    world.machine.controller._recipe = world.recipe.model_copy(update={"rollout": small})
    answer = shape(world, joined=True)
    assert "slot b/0+1, which needs tensor_parallel 2; the buckets have small 1" in answer.text


def test_an_order_that_is_carried_out_already_moves_nothing():
    world = scene(pool="rollout")
    shape(world, joined=True)
    world.arrive()
    answer = shape(world, joined=True)
    assert (answer.accepted, answer.text) == (True, "nothing has to move")


def test_a_split_of_roles_leaves_joined_slots_as_they_are():
    world = scene(pool="hybrid")
    shape(world, joined=True)
    world.arrive()
    answer = world.order(gradient=1, rollout=1, train=2)
    assert answer.accepted, answer.text
    world.arrive()
    assert BOTH in serving(world)
    refused = world.order((BOTH, Role.GRADIENT))
    assert refused.text == f"slot {BOTH} is of pool rollout: it cannot be pinned to gradient"


@pytest.mark.parametrize(("least", "accepted"), [(2, True), (3, False)])
def test_a_joined_server_counts_as_many_as_its_slots_for_those_that_must_serve(least, accepted):
    world = scene()
    shape(world, joined=True)
    slots, plan = world.machine.reconciler.slots, world.machine.plan
    roles = {slot.id: world.machine.reconciler.role_of(slot.id) for slot in slots}
    given = world.recipe.planner.model_copy(update={"min_rollout": least})
    asked = world.recipe.model_copy(update={"planner": given})
    if accepted:
        assert BOTH in dict(
            ordered_plan(asked, slots, roles, plan.train, {GRADIENT: 1}, {}).servers
        )
    else:
        with pytest.raises(OrderRefused, match="2 slots would serve"):
            ordered_plan(asked, slots, roles, plan.train, {GRADIENT: 1}, {})


def test_the_planner_may_choose_joined_slots(world):
    plan, slots = world.machine.plan, world.machine.reconciler.slots
    shape(world, joined=True)
    joined = world.machine.plan, world.machine.reconciler.slots
    world.arrive()
    world.give(e.PlanChosen(plan, slots))
    world.arrive()
    assert serving(world) == {"a/0", "a/1", B0, B1}
    world.give(e.PlanChosen(*joined))
    world.arrive()
    assert serving(world) == {"a/0", "a/1", BOTH}
    assert replace(world.machine.plan, reasons=()) == replace(joined[0], reasons=())
