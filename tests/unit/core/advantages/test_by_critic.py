"""A run whose trainer has a critic: what it is told of turns, and what becomes of what it says."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from json import loads
from random import Random
from typing import Any

import pytest

from libra_cli.core import actions as a
from libra_cli.core.actions import TrainSample, without_advantage
from libra_cli.core.records import CreditRecord, StepRecord
from libra_cli.core.types import Branch, Trajectory, TrajectoryId, TurnReward
from tests.world import Faults, World, algorithm, recipe

BROKEN = Faults(server_dies=0.003, turn_fails=0.02, environment_breaks=0.03, forked=0.2)


class Masked(World):
    """Its batches lack what was masked."""

    def _check_batch(self, samples: Sequence[TrainSample]) -> None:
        pass


def world_of(
    seed: int, faults: Faults | None = None, kind: type[World] = World, **changes: Any
) -> World:
    training = {"advantage": "gae", "groups_per_step": 3, "checkpoint_every": 2}
    return kind(Random(seed), faults or Faults(), recipe(training=training, **changes))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_trainer_is_told_every_turn_of_what_it_trains(seed: int, size: int):
    world = world_of(seed, BROKEN, rollout={"group_size": size}).run()
    assert world.end == a.End("finished", "")
    assert len(world.samples) > 10
    told: dict[int, dict[int, tuple[int, float]]] = {}
    for sample in world.samples:
        of_trajectory = told.setdefault(id(sample.trajectory), {})
        for number, token, reward in sample.turns:
            assert sample.tokens.loss_mask[token] == 1
            of_trajectory[number] = (token, reward)
    for sample in world.samples:
        turns = sample.trajectory.turn_rewards
        wanted = {number: (one.start, one.reward) for number, one in enumerate(turns)}
        assert told[id(sample.trajectory)] == wanted


def test_a_turn_is_told_with_the_branch_that_it_is_in():
    trajectory = Trajectory(id=TrajectoryId(0, 0), token_ids=array("i", range(9)), number=1)
    trajectory.others[0] = Branch(token_ids=array("i", range(6)))
    trajectory.turn_rewards = [
        TurnReward(0, 2, 4, 0.5),
        TurnReward(1, 3, 5, 0.25),
        TurnReward(0, 5, 6, 1.0),
    ]
    with_critic = algorithm(advantage="gae")
    assert with_critic.advantage.turns_of(trajectory, None) == ((1, 3, 0.25),)
    assert with_critic.advantage.turns_of(trajectory, 0) == ((0, 2, 0.5), (2, 5, 1.0))
    assert algorithm().advantage.turns_of(trajectory, 0) == ()
    sample = TrainSample(trajectory, 0, True, (), 0, turns=((0, 2, 0.5),))
    assert without_advantage(sample).turns == ()


def test_what_the_critic_said_is_kept_with_every_trajectory_and_told_of_the_batch():
    world = world_of(0).run()
    batch = world.rows(StepRecord)[0].batch
    assert batch["advantage_std"] is not None
    assert batch["advantage_std"] > 0
    assert batch["share_without_signal"] == 0.0  # groups whose rewards are alike teach too
    rows = world.rows(CreditRecord)
    assert any(len(loads(row.turns_json)) > 1 for row in rows)
    for row in rows:
        (runs,), turns = loads(row.advantages_json), loads(row.turns_json)
        if len(turns) == 1:
            assert runs == [[0, turns[0][3]]]
        else:
            said = [[start, reward - n / 4] for n, (_, start, _, reward) in enumerate(turns)]
            assert runs == said


def test_what_was_masked_has_no_advantage():
    """The trainer is told nothing of them, and so says nothing."""
    world = world_of(0, rollout={"overlong": {"mask": True}, "max_turns": 1}, kind=Masked).run()
    assert world.end == a.End("finished", "")
    trained = {one.trajectory.id[:2] for one in world.samples if one.turns}
    rows = world.rows(CreditRecord)
    masked = [row for row in rows if (row.group_id, row.member) not in trained]
    assert trained
    assert masked
    assert all(loads(row.advantages_json) == [[[0, 0.0]]] for row in masked)
