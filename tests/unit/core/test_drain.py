"""A run that ends waits for a step and a checkpoint, but not for ever."""

from __future__ import annotations

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.step_book import PATIENCE_S
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.records import RunRecord
from libra_cli.core.rollout.active import Stage
from libra_cli.core.run.course import DRAIN_S
from tests.elastic import Scene, of, scene


def hang(world: Scene, kind: type[e.Event]) -> float:
    """Ask the run to stop while this does not come; when it was asked."""
    world.silent = of(kind)
    if kind is e.StepDone:
        world.until(lambda: world.kept)
    world.give(e.StopRequested(at_once=False, reason="asked"))
    return world.now


@pytest.mark.parametrize("kind", [e.StepDone, e.CheckpointSaved])
def test_a_step_or_a_checkpoint_that_hangs_does_not_hold_the_end_of_a_run_for_ever(kind):
    world = scene()
    asked = hang(world, kind)
    world.until(lambda: world.end)
    assert world.end is not None
    assert PATIENCE_S <= world.now - asked <= PATIENCE_S + 100
    assert world.end.state == "failed"
    what = "step" if kind is e.StepDone else "the checkpoint of step"
    assert f"{what} " in world.end.error
    assert "did not end within" in world.end.error
    assert "libra run RECIPE --resume RUN_DIR" in world.end.error


def test_a_run_whose_steps_are_slow_is_waited_for_twice_as_long_as_the_slowest():
    world = scene()
    training = world.machine.training
    world.until(lambda: training.state is TrainerState.BUSY)
    step, world.silent = training.step, of(e.StepDone)
    world.until(lambda: world.kept)
    world.idle(2 * PATIENCE_S)
    world.speak()
    assert training.step > step
    asked = hang(world, e.StepDone)
    world.until(lambda: world.end)
    assert 4 * PATIENCE_S <= world.now - asked <= 4 * PATIENCE_S + 100


def test_a_checkpoint_that_is_slow_is_written_before_the_end():
    world = scene()
    hang(world, e.CheckpointSaved)
    world.until(lambda: world.kept)
    world.idle(PATIENCE_S - 60)
    world.speak()
    world.until(lambda: world.end)
    assert world.end == a.End("stopped", "asked")


def test_a_turn_that_is_generated_is_waited_for_while_others_are_in_their_environments():
    world = scene()
    rollout, training = world.machine.rollout, world.machine.training
    world.silent = of((e.TurnGenerated, e.EpisodeAdvanced))

    def held() -> set[Stage]:
        return {one.stage for one in rollout.active.values()}

    world.until(lambda: held() >= {Stage.GENERATING, Stage.ADVANCING})
    assert not world.rows(RunRecord)[-1].is_ending
    world.give(e.StopRequested(at_once=False, reason="asked"))
    world.until(lambda: not training.at_work)
    assert not world.did(a.StopServer)
    assert world.rows(RunRecord)[-1].is_ending
    world.speak()
    world.until(lambda: world.end)
    assert world.end == a.End("stopped", "asked")


def test_what_is_in_its_environment_is_not_waited_for():
    world = scene()
    active = world.machine.rollout.active
    world.silent = of(e.EpisodeAdvanced)
    world.until(
        lambda: world.kept and not any(a.stage is Stage.GENERATING for a in active.values())
    )
    world.give(e.StopRequested(at_once=False, reason="asked"))
    asked = world.now
    world.until(lambda: world.did(a.StopServer))
    assert world.now - asked < DRAIN_S
