"""A trainer that dies is started again, but not for ever on the same group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.fatal_groups import MAX_DEATHS, FatalGroupDetector
from libra_cli.core.cluster.step_batch import StepBatch
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.records import GroupRecord, NoteRecord
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.staleness import hold
from tests.elastic import Scene, scene
from tests.world import algorithm


def die_in(world: Scene, step: int) -> None:
    training = world.machine.training
    world.until(lambda: training.state is TrainerState.BUSY and training.step + 1 == step)
    world.give(e.TrainerFailed(training.incarnation, "killed"))


def poisoned(event: e.Event, world: Scene, poison: set[int]) -> bool:
    """Whether the answer is to a message with one of these groups in it."""
    return isinstance(event, e.StepDone | e.Accumulated) and bool(poison & in_hand(world))


def in_hand(world: Scene) -> set[int]:
    """The groups of the last message to the trainer."""
    sent = [one for one in world.log if isinstance(one, a.Train | a.Accumulate)]
    return {sample.trajectory.id.group for sample in sent[-1].samples}


def play(world: Scene, poison: set[int], steps: int) -> None:
    """The trainer dies of every message with such a group in it, until so many steps are done."""
    training = world.machine.training
    world.silent = lambda event: poisoned(event, world, poison)
    last = training.step + steps
    while training.step < last:
        world.until(lambda: world.kept or training.step >= last)
        if world.kept:
            world.kept.clear()
            world.give(e.TrainerFailed(training.incarnation, "log-probabilities are not finite"))


def dropped(world: Scene) -> list[GroupRecord]:
    return [row for row in world.rows(GroupRecord) if row.state == "dropped"]


def test_a_group_that_kills_the_trainer_is_found_and_dropped_and_the_run_goes_on():
    world = scene(checkpoint_every=2)
    poison = {world.machine.ledger.next_group + 2}
    play(world, poison, 6)
    assert [row.group_id for row in dropped(world)] == sorted(poison)
    assert "not finite" in dropped(world)[0].detail
    assert len(world.did(a.StartTrainer)) == 4
    (note,) = [note for note in world.rows(NoteRecord) if note.kind == "batch"]
    assert note.subject == f"group {next(iter(poison))}"
    done = {row.group_id for row in world.rows(GroupRecord) if row.state == "trained"}
    assert not poison & done


def test_the_others_of_a_batch_with_such_a_group_are_trained():
    world = scene(checkpoint_every=2)
    poison = {world.machine.ledger.next_group + 2}
    play(world, poison, 6)
    done = {row.group_id for row in world.rows(GroupRecord) if row.state == "trained"}
    first = next(one for one in world.did(a.Train) if poison & groups_of(one))
    assert groups_of(first) - poison <= done


def groups_of(train: a.Train) -> set[int]:
    return {sample.trajectory.id.group for sample in train.samples}


def test_only_a_suspect_that_was_sent_alone_is_guilty():
    detector = FatalGroupDetector()
    ledger = GroupLedger(group_size=1, groups_per_step=2, rule=hold(0), retries=1)
    first, second = (ledger.open(version=0, now=0.0) for _ in range(2))
    assert detector.died_with([first]) == []
    for _ in range(MAX_DEATHS):
        assert detector.died_with([first, second]) == []
    assert detector.died_with([first]) == [first]
    assert detector.died_with([first]) == [], "it was told, and is known no more"


def test_a_group_is_suspect_after_its_second_death_and_not_before():
    detector = FatalGroupDetector()
    ledger = GroupLedger(group_size=1, groups_per_step=1, rule=hold(0), retries=1)
    group = ledger.open(version=0, now=0.0)
    for _ in range(MAX_DEATHS):
        assert (bool(detector), detector.include([group])) == (False, False)
        detector.died_with([group])
    assert (bool(detector), detector.include([group])) == (True, True)
    detector.cleared([group])
    assert not detector


def test_a_batch_that_is_sent_one_by_one_is_followed_by_no_full_one_before_its_end():
    ledger = GroupLedger(group_size=1, groups_per_step=2, rule=hold(1), retries=1)
    batch = StepBatch(ledger, algorithm())

    def play_two() -> None:
        for _ in range(2):
            (member,) = ledger.open(version=0, now=0.0).members
            member.min_version = 0
            ledger.finish(member.id, 1.0)

    assert not batch.is_full
    play_two()
    assert batch.is_full
    for _ in range(MAX_DEATHS):
        batch.send(batch.claim(1, now=0.0)[1])
        batch.died("killed", now=0.0)
        batch.begin(0, now=0.0)
    _, (_,), whole = batch.claim(1, now=0.0)
    play_two()
    assert not whole
    assert not batch.is_full
    _, (_,), whole = batch.claim(1, now=0.0)
    assert whole
    assert batch.is_full


def test_two_kills_in_one_step_by_somebody_else_drop_nothing():
    world = scene()
    step = world.machine.training.step + 1
    die_in(world, step)
    die_in(world, step)
    world.steps_on(3)
    assert not dropped(world)


def test_deaths_in_different_steps_are_no_reason_to_give_up():
    world = scene()
    step = world.machine.training.step + 1
    die_in(world, step)
    die_in(world, step + 1)
    world.steps_on()


def test_a_damaged_checkpoint_ends_the_run_with_what_to_type_at_once():
    world = scene(checkpoint_every=2)
    training = world.machine.training
    world.steps_on(3)
    world.give(e.TrainerFailed(training.incarnation, "killed"))
    world.until(lambda: training.state is TrainerState.STARTING)
    starts = len(world.did(a.StartTrainer))
    world.give(e.TrainerFailed(training.incarnation, "step-2 is damaged: weights.pt"))
    world.until(lambda: world.end)
    assert world.end is not None
    assert world.end.state == "failed"
    assert "step-2 is damaged" in world.end.error
    assert "libra run RECIPE --resume RUN_DIR" in world.end.error
    assert len(world.did(a.StartTrainer)) == starts


@pytest.mark.parametrize(
    ("state", "reason"),
    [(TrainerState.STARTING, "killed"), (TrainerState.READY, "step-2 is damaged: weights.pt")],
)
def test_a_trainer_that_dies_otherwise_is_started_again(state, reason):
    world = scene(checkpoint_every=2)
    training = world.machine.training
    world.steps_on(3)
    world.give(e.TrainerFailed(training.incarnation, "killed"))
    world.until(lambda: training.state is state)
    starts = len(world.did(a.StartTrainer))
    world.give(e.TrainerFailed(training.incarnation, reason))
    world.until(lambda: len(world.did(a.StartTrainer)) > starts)
    assert world.end is None


def test_the_end_of_a_message_is_waited_for_while_its_step_is_in_hand():
    world = scene(checkpoint_every=2)
    training = world.machine.training
    world.until(lambda: training.state is TrainerState.BUSY)
    train = world.did(a.Train)[-1]
    assert train.step == training.step + 1
    assert training.wants(train)
    assert not training.wants(replace(train, step=train.step + 1))
    assert not training.wants(replace(train, step=train.step - 1))
    assert not training.wants(replace(train, incarnation=train.incarnation + 1))
    assert not training.wants(a.StartTrainer(training.incarnation, train=(), resume=""))
    world.until(lambda: training.step == train.step)
    assert not training.wants(train)
