"""Restarts are counted in a window of work, with growing waits, and never for the life of a run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.restarts import (
    FIRST_WAIT_S,
    LATER_S,
    MAX_RESTARTS,
    MOST_WAIT_S,
    WINDOW_S,
    RestartBudget,
)
from libra_cli.core.cluster.rollout_servers import MAX_BROKEN_SYNCS
from libra_cli.core.cluster.trainer_life import RESTART_EVERY_S, TrainerState
from libra_cli.core.records import NoteRecord
from libra_cli.core.timer_key import TimerOwner
from tests.elastic import Scene, of, scene

HOUR = 3600.0
LIVES = st.lists(st.tuples(st.floats(0.0, 2000.0), st.floats(0.0, 2000.0)), min_size=1, max_size=60)
"""Seconds that it takes to start, and then works, until it dies."""


def notes_of_slots(world: Scene) -> list[NoteRecord]:
    return [note for note in world.rows(NoteRecord) if note.kind == "slot"]


def lives(budget: RestartBudget, times: list[tuple[float, float]]) -> list[float | None]:
    """The wait after each death, until it is given up."""
    now, waits = 0.0, []
    for starts_s, works_s in times:
        now += starts_s
        budget.works(now=now)
        now += works_s
        budget.worked(now=now)
        waits.append(budget.wait_s())
        if waits[-1] is None:
            break
        now += waits[-1]
    return waits


@given(LIVES)
def test_no_window_of_work_has_more_restarts_than_the_budget(times):
    waits = lives(RestartBudget(), times)
    worked, deaths = 0.0, []
    for (_, works_s), wait_s in zip(times, waits, strict=False):
        worked += works_s
        deaths.append(worked)
        of_late = [at for at in deaths if worked - at < WINDOW_S]
        assert (wait_s is None) == (len(of_late) > MAX_RESTARTS)


@given(LIVES)
def test_the_wait_doubles_with_each_death_that_counts_and_is_bounded(times):
    waits = [wait_s for wait_s in lives(RestartBudget(), times) if wait_s is not None]
    assert waits[0] == 0.0
    for before, after in pairwise(waits):
        assert after <= max(FIRST_WAIT_S, 2 * before)
        assert after <= MOST_WAIT_S


@given(st.lists(st.floats(0.0, HOUR), min_size=MAX_RESTARTS + 1, max_size=20))
def test_what_dies_at_once_every_time_is_given_up_however_long_it_takes_to_start(starts):
    waits = lives(RestartBudget(), [(starts_s, 0.0) for starts_s in starts])
    assert len(waits) == MAX_RESTARTS + 1
    assert waits[-1] is None


@given(st.lists(st.floats(WINDOW_S / MAX_RESTARTS + 1, HOUR), max_size=100))
def test_what_dies_now_and_then_is_never_given_up(worked):
    assert None not in lives(RestartBudget(), [(10.0, works_s) for works_s in worked])


def test_a_budget_that_is_refilled_knows_of_no_death():
    budget = RestartBudget()
    assert None not in [budget.wait_s() for _ in range(MAX_RESTARTS)]
    assert budget.wait_s() is None
    budget.refill()
    assert budget.wait_s() == 0.0


@pytest.mark.parametrize(("worked_s", "wait_s"), [(0.6 * WINDOW_S, FIRST_WAIT_S), (WINDOW_S, 0.0)])
def test_work_counts_once_however_often_it_is_said(worked_s, wait_s):
    budget = RestartBudget()
    budget.wait_s()
    budget.works(now=0.0)
    for _ in range(3):
        budget.worked(now=worked_s)
    assert budget.wait_s() == wait_s


def kill(world: Scene, slot: str) -> None:
    server = world.machine.servers.replicas[slot]
    world.until(lambda: server.state is ReplicaState.SERVING)
    world.give(e.ServerFailed(slot, server.incarnation, "killed"))


def test_ten_kills_of_a_server_an_hour_apart_end_nothing():
    world = scene()
    server = world.machine.servers.replicas["b/0"]
    for _ in range(10):
        world.until(lambda: server.state is ReplicaState.SERVING)
        world.idle(HOUR)
        kill(world, "b/0")
    world.until(lambda: server.state is ReplicaState.SERVING)
    assert server.restarts == 10


def test_four_kills_of_the_only_server_each_after_it_served_again_end_nothing():
    world = scene()
    for slot in ("a/1", "b/1"):
        server = world.machine.servers.replicas[slot]
        server.has_worked = False
        world.give(e.ServerFailed(slot, server.incarnation, "broken"))
    for _ in range(4):
        kill(world, "b/0")
    world.steps_on(2)


def test_a_server_that_dies_at_once_every_time_is_tried_again_much_later_while_another_serves():
    world = scene(steps=100_000)
    server = world.machine.servers.replicas["b/0"]
    while server.state is not ReplicaState.FAILED:
        kill(world, "b/0")
        world.until(lambda: server.state in (ReplicaState.SERVING, ReplicaState.FAILED))
    assert server.restarts == MAX_RESTARTS
    given_up = world.now
    (note,) = notes_of_slots(world)
    assert (note.subject, note.resolved_at) == ("b/0", None)
    assert "it died too often and is tried again in 30 min; libra logs b" in note.text
    world.until(lambda: server.state is ReplicaState.SERVING, most=200_000)
    assert world.now >= given_up + LATER_S
    assert notes_of_slots(world)[-1].resolved_at is not None


def test_no_server_is_left_only_when_all_are_given_up_and_then_it_says_what_to_do():
    world = scene()
    world.faults.start_fails = 1.0
    for slot in ("a/1", "b/0", "b/1"):
        assert world.end is None
        kill(world, slot)
    world.until(lambda: world.end)
    assert world.end is not None
    assert world.end.state == "failed"
    assert "no server is left" in world.end.error
    assert "libra run RECIPE --resume RUN_DIR" in world.end.error


@pytest.mark.parametrize(
    ("lived_s", "wait_s"),
    [(5.0, FIRST_WAIT_S), (59.0, FIRST_WAIT_S), (61.0, FIRST_WAIT_S), (HOUR, 0.0)],
)
def test_a_trainer_is_started_again_a_minute_after_the_last_start_at_the_earliest(lived_s, wait_s):
    world = scene()
    training = world.machine.training
    world.give(e.TrainerFailed(training.incarnation, "killed"))
    world.until(lambda: training.state is TrainerState.STARTING)
    started = world.now
    world.until(lambda: training.state is TrainerState.READY)
    world.idle(started + lived_s - world.now)
    world.give(e.TrainerFailed(training.incarnation, "killed"))
    world.until(lambda: training.state is TrainerState.DOWN)
    wake = [wake for wake in world.did(a.Wake) if wake.name == TimerOwner.TRAINER][-1]
    wanted = max(wait_s, started + RESTART_EVERY_S - world.now)
    assert wake.after_s == pytest.approx(wanted)


def test_ten_kills_of_the_trainer_an_hour_apart_end_nothing():
    world = scene()
    training = world.machine.training
    for _ in range(10):
        world.until(lambda: training.state is TrainerState.READY)
        world.idle(HOUR)
        world.give(e.TrainerFailed(training.incarnation, "killed"))
    world.steps_on(2)


def test_a_trainer_that_dies_at_once_every_time_ends_the_run_which_says_what_to_do():
    world = scene()
    training = world.machine.training
    while world.end is None:
        world.until(lambda: training.state is TrainerState.READY or world.end)
        if world.end is None:
            world.give(e.TrainerFailed(training.incarnation, "killed"))
    assert len(world.did(a.StartTrainer)) == MAX_RESTARTS + 1
    assert "killed" in world.end.error
    assert "libra run RECIPE --resume RUN_DIR" in world.end.error


def test_a_server_that_generates_but_cannot_be_given_a_version_is_replaced():
    """Its answers used to make good for the versions that did not reach it."""
    world = scene()
    server = world.machine.servers.replicas["b/0"]
    before = server.incarnation
    world.silent = of((e.ServerSynced, e.SyncFailed), "b/0")
    for _ in range(MAX_BROKEN_SYNCS):
        assert server.incarnation == before
        world.until(lambda: server.syncing is not None and not server.suspect)
        published = server.syncing
        assert published is not None
        world.give(e.SyncFailed("b/0", before, published, "no answer", answered=False))
        world.until(lambda: not server.suspect)
    assert server.incarnation == before + 1
