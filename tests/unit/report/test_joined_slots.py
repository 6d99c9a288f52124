"""Slots that are joined and split: what status tells of them, and whom their moves concern."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from libra_cli.core.records import TurnRecord
from libra_cli.report.status.migration_impact import migration_impacts
from libra_cli.report.status.plans import moves
from libra_cli.report.status.slots import existing
from libra_cli.report.status.summary import summary
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from tests.elastic import Scene
from tests.unit.core.reconcile.test_joined_slots import BOTH, scene, shape


def records_of(world: Scene, run_dir: Path) -> Reader:
    """What the world has written, in a database."""
    run_dir.mkdir(parents=True)
    with Journal(run_dir, on_error=lambda error: None) as journal:
        for record in world.records:
            journal.save(record)
    return Reader(run_dir)


def shown(world: Scene, run_dir: Path) -> dict[str, str]:
    with records_of(world, run_dir) as reader:
        told = summary(reader, now=world.now)
    return {slot.slot: slot.state for slot in told.slots}


def test_slots_that_exist_no_more_are_not_shown(tmp_path):
    world = scene(pool="rollout")
    names = ["a/0", "a/1", "b/0", "b/1", "c/0"]
    assert sorted(shown(world, tmp_path / "apart")) == names
    shape(world, joined=True)
    world.arrive()
    told = shown(world, tmp_path / "joined")
    assert sorted(told) == ["a/0", "a/1", BOTH, "c/0"]
    assert told[BOTH] == "serving"
    shape(world, joined=False)
    world.arrive()
    assert sorted(shown(world, tmp_path / "split")) == names


def test_a_part_is_shown_until_its_server_is_gone(tmp_path):
    world = scene(hosts="b", pool="rollout")
    shape(world, joined=True)
    told = shown(world, tmp_path / "run")
    assert told["b/1"] == "serving"


def test_what_a_dead_controller_left_of_a_joined_slot_is_not_shown_after_a_resume(tmp_path):
    world = scene(pool="rollout")
    shape(world, joined=True)
    world.arrive()
    with records_of(world, tmp_path / "run") as reader:
        rows, first = reader.slots(), replace(reader.plans()[0], at=world.now + 10)
    left = existing(rows, first, since=first.at)
    assert sorted(row.slot for row in left) == ["a/0", "a/1", "b/0", "b/1", "c/0"]


@pytest.mark.parametrize(("slot", "counts"), [("a/0", True), ("b/0", False), (BOTH, False)])
def test_turns_on_parts_of_a_joined_slot_are_not_the_others(tmp_path, slot, counts):
    world = scene(pool="rollout")
    shape(world, joined=True)
    world.arrive()
    move = world.moved(BOTH)
    own = [record for record in world.records if not isinstance(record, TurnRecord)]
    (turn, *_) = world.rows(TurnRecord)
    assert move.ended_at is not None
    during = {"started_at": move.started_at, "ended_at": move.ended_at}
    world.records = [*own, replace(turn, slot=slot, generated_tokens=1000, **during)]
    with records_of(world, tmp_path / "run") as reader:
        told = moves(reader, now=world.now)
        (around,) = [seen for move, seen in migration_impacts(reader, told) if move.slot == BOTH]
    expected = 1000 / (move.ended_at - move.started_at)
    assert around.during.tokens_per_s == pytest.approx(expected if counts else 0.0)
