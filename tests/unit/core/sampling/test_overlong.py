"""Truncated trajectories are known, may be left out of the loss; long ones may lose reward."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest
from pydantic import ValidationError

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.sampling.overlong import overlong_penalty
from libra_cli.core.types import is_evaluation
from tests.world import World, recipe


@pytest.mark.parametrize(
    ("tokens", "lost"), [(0, 0.0), (15, 0.0), (16, 0.0), (18, 0.25), (24, 1.0), (30, 1.0)]
)
def test_the_penalty_rises_over_the_buffer_as_in_dapo(tokens, lost):
    # arXiv 2503.14476, equation 13, with L_max = 24 and L_cache = 8.
    assert overlong_penalty(tokens, most=24, buffer=8, penalty=1.0) == lost


def test_without_a_buffer_there_is_no_penalty():
    assert overlong_penalty(99, most=24, buffer=0, penalty=0.0) == 0.0


class Long(World):
    """Some turns are cut; others are not, and their trajectories end without a limit."""

    given: list[a.TrainSample]

    def later(self, event, *times, **more):
        if isinstance(event, e.TurnGenerated) and event.trajectory.member == 0:
            event = replace(event, finish_reason="length")
        elif isinstance(event, e.EpisodeAdvanced) and not event.done:
            event = replace(event, observation_ids=array("i"), done=True, reward=1.0)
        super().later(event, *times, **more)

    def _check_batch(self, samples):
        self.given = [*getattr(self, "given", ()), *samples]


def test_a_trajectory_whose_last_turn_was_cut_is_truncated():
    world = Long(Random(0)).run()
    for row in world.trajectories:
        if row.state == "finished":
            assert row.truncated == (row.member == 0)
    assert {step.batch["share_truncated"] for step in world.steps} == {0.5}


def test_one_that_a_limit_of_turns_ended_is_truncated():
    world = World(Random(0), recipe=recipe(rollout={"max_turns": 1})).run()
    asked = [row for row in world.trajectories if row.state == "finished" and row.reward == 0.0]
    assert any(row.truncated for row in asked)


def test_masked_ones_are_not_given_to_the_trainer_and_still_counted():
    world = Long(Random(0), recipe=recipe(rollout={"overlong": {"mask": True}}))
    world.run()
    assert world.end == a.End("finished", "")
    assert {sample.trajectory.id.member for sample in world.given} == {1}
    rows = {(row.group_id, row.member): row.generated_tokens for row in world.trajectories}
    for step in world.steps:
        groups = {group for group, at in world.trained if at == step.step}
        tokens = sum(rows[group, member] for group in groups for member in range(2))
        assert step.generated_tokens == tokens


class AllCut(Long):
    """Every turn is cut."""

    def later(self, event, *times, **more):
        if isinstance(event, e.TurnGenerated):
            event = replace(event, finish_reason="length")
        super().later(event, *times, **more)


def test_a_batch_in_which_all_are_masked_has_no_advantage():
    world = AllCut(Random(0), recipe=recipe(rollout={"overlong": {"mask": True}}))
    world.run()
    assert world.end == a.End("finished", "")
    assert len(world.given) == 30
    assert all(not sample.advantages for sample in world.given)


def test_what_a_long_trajectory_loses_is_gone_from_its_reward():
    overlong = {"penalty": 0.5, "buffer": 59}
    world = Long(Random(0), recipe=recipe(rollout={"overlong": overlong})).run()
    for row in world.trajectories:
        if row.state == "finished":
            lost = 0.5 * max(0, row.context_tokens - 1) / 59
            assert 1.0 - lost == pytest.approx(row.reward) or row.reward == pytest.approx(-lost)


def test_evaluations_lose_nothing():
    overlong = {"penalty": 0.5, "buffer": 59}
    evaluation = {"num_tasks": 2, "samples": 1, "every": 5}
    world = World(
        Random(0), recipe=recipe(rollout={"overlong": overlong}, evaluation=evaluation)
    ).run()
    evaluated = [row for row in world.trajectories if is_evaluation(row.group_id)]
    assert {row.reward for row in evaluated if row.state == "finished"} <= {0.0, 1.0}


@pytest.mark.parametrize("overlong", [{"penalty": 1.0}, {"buffer": 8}])
def test_a_penalty_and_its_buffer_come_together(overlong):
    with pytest.raises(ValidationError, match="one does nothing without the other"):
        recipe(rollout={"overlong": overlong})


def test_a_buffer_of_the_whole_length_is_refused():
    with pytest.raises(ValidationError, match="from its first token on"):
        recipe(rollout={"overlong": {"penalty": 1.0, "buffer": 60}})
