"""Trajectories begin where hosts hold them, and what waits for a place is counted and not begun."""

from __future__ import annotations

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.records import StepRecord
from libra_cli.core.rollout.places import EpisodePlaces
from tests.elastic import Scene, scene


def most_at_once(world: Scene, steps: int = 3) -> int:
    """The most trajectories that were in play at any moment of so many steps."""
    most, done = 0, world.machine.training.step

    def over() -> bool:
        nonlocal most
        most = max(most, len(world.machine.rollout.active))
        return world.machine.training.step >= done + steps

    world.until(over)
    return most


def told(world: Scene, number: int | None) -> None:
    world.give(e.PlacesCounted(number))
    world.until(lambda: len(world.machine.rollout.active) <= (number or 1000))


def test_no_more_begin_than_hosts_hold() -> None:
    assert most_at_once(scene()) > 4
    world = scene()
    told(world, 4)
    assert most_at_once(world) == 4


def test_one_group_always_has_its_places() -> None:
    world = scene()
    told(world, 1)
    assert most_at_once(world) == world.machine.ledger.members_started == 2


def test_a_step_tells_for_how_long_a_group_was_kept_back() -> None:
    world = scene()
    assert "places_full_s" not in world.rows(StepRecord)[-1].batch
    told(world, 2)
    world.steps_on(3)
    step = world.rows(StepRecord)[-1]
    assert 0 < step.batch["places_full_s"] <= step.period_s + 1e-9
    told(world, None)
    world.steps_on(2)
    assert "places_full_s" not in world.rows(StepRecord)[-1].batch


def test_who_waits_for_a_place_has_not_been_begun() -> None:
    world = scene()
    told(world, 2)
    world.steps_on(3)
    begun = {action.trajectory for action in world.did(a.StartEpisode)}
    known = {one.id for group in world.machine.ledger.groups.values() for one in group.members}
    assert known <= begun


def test_seconds_count_only_while_places_alone_keep_a_group_back() -> None:
    places = EpisodePlaces()
    assert places.allow(1000, 8, now=0.0)
    assert places.take_metrics(now=9.0) == {}
    places.number = 10
    assert places.allow(2, 8, now=10.0)
    assert not places.allow(4, 8, now=11.0)
    assert not places.allow(3, 8, now=12.0)
    assert places.take_metrics(now=14.0) == {"places_full_s": 3.0}
    places.nobody_asks(now=15.0)
    assert places.take_metrics(now=20.0) == {"places_full_s": 1.0}
    assert places.allow(0, 12, now=21.0)
