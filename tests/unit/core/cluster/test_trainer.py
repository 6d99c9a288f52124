"""A trainer that dies is started again, but not for ever on the same batch."""

from __future__ import annotations

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.trainer import TrainerState
from tests.elastic import Scene, scene


def die_in(world: Scene, step: int) -> None:
    training = world.machine.training
    world.until(lambda: training.state is TrainerState.BUSY and training.step + 1 == step)
    world.give(e.TrainerFailed(training.incarnation, "killed"))


def test_a_step_that_has_ended_the_trainer_twice_is_not_tried_again():
    world = scene()
    training = world.machine.training
    step = training.step + 1
    die_in(world, step)
    die_in(world, step)
    started = len(world.did(a.StartTrainer))
    world.until(lambda: training.state is TrainerState.FAILED)
    assert f"step {step} has ended the trainer 2 times" in training.detail
    assert "killed" in training.detail
    assert len(world.did(a.StartTrainer)) == started


def test_deaths_in_different_steps_are_no_reason_to_give_up():
    world = scene()
    step = world.machine.training.step + 1
    die_in(world, step)
    die_in(world, step + 1)
    world.steps_on()
