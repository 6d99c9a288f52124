"""Journal and checkpoint prove that nothing is trained twice, and no dropped group revives."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.records import GroupRecord, LateRecord, StepRecord, TrajectoryRecord
from libra_cli.core.rollout.once import check_once, dropped_in
from libra_cli.core.run.state import Resume
from libra_cli.core.sampling.curriculum import Curriculum
from tests.world import FEW_RUNS, Faults, World

FAULTS = Faults(server_dies=0.004, trainer_dies=0.004, environment_breaks=0.03, refused=0.02)


def last_position(world: World):
    """What the newest checkpoint holds."""
    return world.ledgers[world.machine.training.checkpoints.path]


@FEW_RUNS
@given(st.integers(0, 2**32))
def test_a_run_proves_that_everything_was_trained_once(seed):
    world = World(Random(seed), FAULTS).run()
    position = last_position(world) if world.machine.training.checkpoints.path else None
    assert check_once(world.records, position) == []


@FEW_RUNS
@given(st.integers(0, 2**32), st.integers(30, 400))
def test_so_does_one_that_was_killed_and_goes_on_from_its_checkpoint(seed, events):
    first = World(Random(seed), FAULTS)
    first.play(events)
    path = first.machine.training.checkpoints.path
    if not path or first.end:
        return
    gone = dropped_in(first.records)
    resume = Resume(path, first.ledgers[path], first.machine.training.incarnation, first.records)
    second = World(Random(seed + 1), FAULTS, resume=resume, records=first.records)
    second.ledgers = first.ledgers
    second.run()
    kept = second.machine.training.checkpoints.path
    assert check_once(second.records, second.ledgers[kept]) == []
    assert not gone & {group for group, _ in second.trained}
    assert not gone & set(second.machine.ledger.queue)


def broken(world: World, kind, **changes):
    """The records of a run, with the last of a kind changed."""
    *_, last = [row for row in world.records if isinstance(row, kind)]
    return [*(row for row in world.records if row is not last), replace(last, **changes)]


def test_a_group_in_two_steps_is_found():
    world = World(Random(1)).run()
    first = next(row for row in world.records if isinstance(row, StepRecord))
    found = check_once(broken(world, StepRecord, groups_json=first.groups_json))
    assert any("is trained in step 1 and in step 5" in line for line in found)


@pytest.mark.parametrize(
    ("fourth", "fifth", "twice"),
    [
        ("[[70, [0, 1]]]", "[[70, [1]]]", True),
        ("[[70, [0, 1]]]", "[[70, [2]]]", False),
        ("[70]", "[[70, [1]]]", True),
        ("[[70, [1]]]", "[70]", True),
        ("[70]", "[[71, [1]]]", False),
    ],
)
def test_a_member_in_two_steps_is_found_with_its_group_or_without(fourth, fifth, twice):
    world = World(Random(1)).run()
    rows = [
        replace(row, groups_json={4: fourth, 5: fifth}.get(row.step, "[]")) for row in world.steps
    ]
    found = ["group 70 is trained in step 4 and in step 5"] if twice else []
    assert check_once(rows) == found


def test_steps_of_a_libra_that_named_no_groups_are_passed_over():
    world = World(Random(1)).run()
    rows = [replace(row, groups_json="[]") for row in world.steps]
    assert check_once(rows, last_position(world)) == []


@pytest.mark.parametrize(
    ("states", "dropped"),
    [
        (["open", "dropped"], True),
        (["open", "filtered"], True),
        (["open", "late", "filtered"], False),  # what it left behind is yet to be trained
        (["late", "open", "filtered"], True),  # it was opened again
        (["late", "dropped"], True),
        (["filtered", "open"], False),
    ],
)
def test_a_group_is_dropped_by_its_newest_row_unless_it_was_closed_first(states, dropped):
    row = GroupRecord(7, "open", 0.0, None, 0, None, None, "")
    rows = [LateRecord(7, 1, None) if one == "late" else replace(row, state=one) for one in states]
    assert dropped_in(rows) == ({7} if dropped else set())


def test_a_dropped_group_in_a_step_and_a_scored_failure_are_found():
    world = World(Random(1)).run()
    assert "is dropped, and trained" in check_once(broken(world, GroupRecord, state="dropped"))[0]
    scored = broken(world, TrajectoryRecord, state="failed", reward=1.0)
    assert "has the reward 1.0" in check_once(scored)[0]


def test_a_checkpoint_of_another_timeline_is_found():
    world = World(Random(1)).run()
    position = last_position(world)
    other = {**position, "trained": [(step, [*names, 99]) for step, names in position["trained"]]}
    assert "the checkpoint has trained" in check_once(world.records, other)[0]
    again = {**position, "queue": [*position["queue"], 0]}
    assert "plays it again" in check_once(world.records, again)[0]


def test_a_group_dropped_after_the_checkpoint_is_not_opened_again_from_the_stream():
    ledger = World(Random(1)).machine.ledger
    position = {"step": 3, "next_group": 9, "queue": [7, 8]}
    ledger.restore(position, dropped={8, 9, 10})
    opened = [ledger.open(version=3, now=0.0).id for _ in range(3)]
    assert opened == [7, 11, 12]


def test_the_task_of_a_group_that_is_not_opened_again_is_dealt_and_forgotten():
    ledger = World(Random(1)).machine.ledger
    ledger.restore({"step": 3, "next_group": 9, "queue": []}, dropped={9, 10})
    ledger.curriculum = Curriculum(5, 0.0, 1.0, 4)
    assert ledger.open(version=3, now=0.0).id == 11
    assert ledger.curriculum.task_of == {11: 2}
