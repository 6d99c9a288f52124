"""A prompt that kills every server it meets is found and dropped, and nothing else is."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.records import GroupRecord, NoteRecord
from libra_cli.core.rollout.fatal_prompts import ALONE
from libra_cli.core.rollout.trajectories import MAX_BREAKS
from tests.elastic import scene
from tests.world import Faults, World, is_one_of, recipe

A_FEW = settings(max_examples=4, deadline=None)


def dropped(world: World) -> list[GroupRecord]:
    return [row for row in world.rows(GroupRecord) if row.state == "dropped"]


def notes(world: World) -> list[NoteRecord]:
    return [note for note in world.rows(NoteRecord) if note.kind == "prompt"]


def some_seats(seats: int) -> World:
    """Four servers of so many seats; of every 61 groups one kills them."""
    groups = max(3, seats)
    return World(
        Random(seats),
        Faults(kills_servers=61),
        recipe=recipe(
            run={"name": "world", "steps": 3},
            rollout={"buckets": [{"name": "all", "max_num_seqs": seats}]},
            training={"groups_per_step": groups, "max_staleness": 2, "checkpoint_every": 1},
        ),
    )


@A_FEW
@given(st.integers(8, 16), st.integers(0, 2**32))
def test_a_prompt_that_kills_servers_is_dropped_and_no_other_is(seats, seed):
    world = some_seats(seats)
    world.random = Random(seed)
    world.run()
    assert world.end == a.End("finished", "")
    assert [row.group_id for row in dropped(world)] == [30]
    assert not any(is_one_of(group, 61) for group, _ in world.trained)


def test_it_is_found_before_a_server_is_given_up():
    world = some_seats(16)
    died: Counter[int] = Counter()
    perform = world._do_generate

    def generate(action):
        died[action.trajectory.group] += is_one_of(action.trajectory.group, 61)
        perform(action)

    world._do_generate = generate  # type: ignore[method-assign]
    world.run()
    members = world.recipe.rollout.group_size
    assert died[30] <= members * (ALONE + 1)
    (note,) = notes(world)
    assert note.subject == "group 30"
    assert "servers when they died" in note.text
    assert "neither trained nor played again" in note.text


def test_a_prompt_that_breaks_off_alone_is_dropped_and_its_servers_are_not():
    faults = Faults(breaks_off=10)
    world = World(Random(2), faults, recipe=recipe(run={"name": "world", "steps": 8})).run()
    assert world.end == a.End("finished", "")
    found = {row.group_id for row in dropped(world)}
    assert found
    assert all(is_one_of(group, 10) for group in found)
    assert all(f"{MAX_BREAKS} times" in note.text for note in notes(world))
    assert all(server.restarts == 0 for server in world.machine.servers.replicas.values())


def test_turns_on_a_server_that_answers_nobody_are_not_blamed_for_it():
    world = scene()
    world.silent = lambda event: isinstance(event, e.TurnGenerated) and event.slot == "b/0"
    server = world.machine.servers.replicas["b/0"]
    before = server.incarnation
    while server.incarnation == before:
        world.until(lambda: world.kept or server.incarnation != before)
        for one in [one for one in world.kept if isinstance(one, e.TurnGenerated)]:
            lost = e.TurnFailed(one.request, one.trajectory, one.slot, one.incarnation, "HTTP 500")
            world.give(lost)
        world.kept.clear()
    world.silent = lambda event: False
    world.steps_on(2)
    assert not dropped(world)


def test_kills_far_apart_make_no_turn_suspect():
    world = scene()
    for slot in ("a/1", "b/0", "b/1", "a/1", "b/0", "b/1"):
        server = world.machine.servers.replicas[slot]
        world.until(partial(getattr, server, "running"))
        world.give(e.ServerFailed(slot, server.incarnation, "killed"))
        world.steps_on(1)
    assert not dropped(world)
