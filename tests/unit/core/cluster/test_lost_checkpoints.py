"""A checkpoint that cannot be written is told and tried again; it ends no trainer."""

from __future__ import annotations

from random import Random

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.checkpoints import Checkpoints
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.records import NoteRecord
from tests.elastic import Scene, scene
from tests.world import Faults, World

FULL = "No space left on device"


def checkpoints(world: Scene) -> list[int]:
    """The steps whose checkpoint was asked for."""
    steps = [train.step for train in world.did(a.Train) if train.ledger is not None]
    return steps + [save.step for save in world.did(a.Checkpoint)]


def notes(world: World) -> list[NoteRecord]:
    return [note for note in world.rows(NoteRecord) if note.kind == "checkpoint"]


def fail_next(world: Scene, every: int) -> int:
    """The next checkpoint cannot be written; its step."""
    world.silent = lambda event: isinstance(event, e.CheckpointSaved)
    training = world.machine.training
    world.until(lambda: world.kept)
    world.silent, world.kept = (lambda event: False), []
    step = checkpoints(world)[-1]
    assert step % every == 0
    world.give(e.CheckpointFailed(training.incarnation, step, FULL))
    return step


def test_the_newest_checkpoint_is_the_last_that_is_there_or_asked_for():
    checkpoints = Checkpoints(every=2)
    assert checkpoints.newest == 0
    checkpoints.asked(2)
    assert (checkpoints.newest, checkpoints.writing) == (2, True)
    checkpoints.forget_asked()
    assert (checkpoints.newest, checkpoints.writing) == (0, False)
    checkpoints.remember("/there", 4)
    assert (checkpoints.newest, checkpoints.writing) == (4, False)


def test_a_checkpoint_that_fails_is_made_up_for_with_the_next_step_and_kills_nobody():
    world = scene(checkpoint_every=4)
    step = fail_next(world, 4)
    assert world.machine.training.state in (TrainerState.READY, TrainerState.BUSY)
    (told,) = notes(world)
    assert FULL in told.text
    assert f"step {step}" in told.text
    assert told.resolved_at is None
    world.until(lambda: world.machine.training.checkpoints.step > step)
    assert world.machine.training.checkpoints.step < step + 4
    assert notes(world)[-1].resolved_at is not None
    assert len(world.did(a.StartTrainer)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_run_whose_last_checkpoint_fails_twice_stops_and_says_so(seed: int):
    """In some of these turns are generated until the patience of the end is over, in some not."""
    world = World(Random(seed), Faults(checkpoint_fails=1.0)).run()
    assert world.end is not None
    assert world.end.state == "failed"
    assert "the checkpoint of step 5 could not be written" in world.end.error
    assert FULL in world.end.error
    assert len({step.step for step in world.steps}) == 5


def test_a_trainer_that_cannot_save_stays_where_it_is():
    """Moving it would lose the steps since the last checkpoint."""
    world = scene(checkpoint_every=1000)
    world.faults.checkpoint_fails = 1.0
    world.order(("b/1", None), train=3)
    before = world.machine.training.slots
    world.until(lambda: notes(world))
    world.steps_on(4)
    assert world.machine.training.slots == before
    assert world.machine.training.life.target_slots == before


def test_what_an_older_trainer_could_not_save_is_no_news():
    world = scene(checkpoint_every=4)
    world.give(e.CheckpointFailed(0, 4, FULL))
    assert not notes(world)


def test_a_resize_that_is_asked_for_after_that_does_not_wait_for_ever():
    world = scene(checkpoint_every=1000)
    world.faults.checkpoint_fails = 1.0
    training = world.machine.training
    before = training.slots
    world.order(train=3)
    world.until(lambda: training.checkpoints.given_up(training.step))
    world.order(train=3)
    world.steps_on(4)
    assert training.slots == before


def test_a_checkpoint_is_given_up_for_its_own_failures_and_not_for_an_earlier_ones():
    kept = Checkpoints(every=4)
    for step in (4, 5, 6):
        kept.asked(step)
        assert kept.failed(step, FULL)
        assert not kept.given_up(step)
    kept.asked(6)
    assert kept.failed(6, FULL)
    assert kept.given_up(6)


def test_after_a_checkpoint_only_those_that_are_due_are_written():
    kept = Checkpoints(every=4)
    kept.asked(4)
    kept.failed(4, FULL)
    assert kept.is_due(5, last=9)
    kept.asked(5)
    kept.remember("/5", 5)
    assert [step for step in range(6, 10) if kept.is_due(step, last=9)] == [8, 9]


def test_a_failure_counts_only_of_the_checkpoint_that_is_waited_for():
    kept = Checkpoints(every=4)
    kept.asked(8)
    assert not kept.failed(4, FULL)
    assert kept.writing
    kept.remember("/8", 8)
    assert not kept.failed(8, FULL), "it is there"
    assert kept.failures == 0


def test_scores_of_evaluations_are_kept_until_a_trainer_begins_before_their_step():
    checkpoints = Checkpoints(every=2)
    for step, score in ((2, 0.5), (4, 0.75), (6, 1.0)):
        checkpoints.evaluation_ended(step, score, incarnation=1)
    assert checkpoints.evaluated == {2: 0.5, 4: 0.75, 6: 1.0}
    checkpoints.begins(2, 4)
    assert checkpoints.evaluated == {2: 0.5, 4: 0.75}


def test_weights_of_a_trainer_are_of_the_past_once_a_later_one_began_before_their_step():
    """The second may begin several times, with other slots: the earliest step counts."""
    checkpoints = Checkpoints(every=2)
    checkpoints.begins(2, 4)
    checkpoints.begins(2, 8)
    assert [step for step in range(8) if checkpoints.still_holds(step, 1)] == [0, 1, 2, 3, 4]
    assert checkpoints.still_holds(7, 2)
    checkpoints.evaluation_ended(6, 1.0, incarnation=1)
    assert checkpoints.evaluated is None
