"""A whole run of an environment with roles: the machine trains each of them by its own reward."""

# mypy: disable-error-code="override"

from __future__ import annotations

from array import array
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core import events as e
from libra_cli.core.actions import TrainSample
from libra_cli.core.types import BranchPoint
from tests.world import FEW_RUNS, Faults, World, recipe

FIRST, SECOND = "first", "second"
OPENING = {FIRST: 101, SECOND: 102}
"""The token that begins what a role reads."""
TURNS = 4


class Game(World):
    """Two roles speak twice each, in turn; the first then wins what the second loses, or some."""

    def _do_start_episode(self, action):
        if self._chance("environment_breaks"):
            self.later(e.EpisodeFailed(action.trajectory, "reset broke"))
            return
        prompt = array("i", [OPENING[FIRST], 1])
        self.later(e.EpisodeStarted(action.trajectory, prompt, role=FIRST))

    def _do_advance_episode(self, action):
        who = action.trajectory
        active = self.machine.rollout.active.get(who)
        if active is None:  # given up since
            return
        if self._chance("environment_breaks"):
            self.later(e.EpisodeFailed(who, "reply broke"))
        elif active.trajectory.turns == TURNS:
            self._end(who)
        else:
            self._pass_on(who, active.trajectory.turns, active.trajectory.branches)

    def _pass_on(self, who, turns, branches):
        role = (FIRST, SECOND)[turns % 2]
        if len(branches) == 1:  # what the second has to read, before it speaks first
            point, heard = BranchPoint(0, 0), array("i", [OPENING[SECOND], 2])
        else:
            point, heard = (
                BranchPoint(turns % 2, len(branches[turns % 2].token_ids)),
                array("i", [7]),
            )
        self.later(e.EpisodeAdvanced(who, heard, (), False, None, branch=point, role=role))

    def _end(self, who):
        won = self.random.choice((-2.0, -1.0, 1.0, 2.0))
        earned = {FIRST: won, SECOND: -won / 2}
        mean = sum(earned.values()) / 2
        self.later(e.EpisodeAdvanced(who, array("i"), (), True, mean, rewards=earned))


def played(seed, faults=None, **training):
    rollout = {"max_turns": TURNS + 1, "max_turn_tokens": 4}
    training = {"scale_rewards": "none", **training}
    world = Game(Random(seed), faults or Faults(), recipe(rollout=rollout, training=training))
    return world.run()


def rewards(sample):
    """What each role has earned in a sample's trajectory."""
    found: defaultdict[str, float] = defaultdict(float)
    for turn in sample.trajectory.turn_rewards:
        found[turn.role] += turn.reward
    return dict(found)


def by_group(world):
    """The samples of each group and role, every time that they were trained."""
    found: defaultdict[Any, dict[int, TrainSample]] = defaultdict(dict)
    for sample in world.samples:
        group, member = sample.trajectory.id[:2]
        found[group, sample.tokens.role][member] = sample
    return found


@FEW_RUNS
@given(seed=st.integers(0, 2**32), faulty=st.booleans())
def test_a_role_is_trained_by_what_it_earns_beyond_the_mean_of_its_role(seed, faulty):
    faults = Faults(server_dies=0.05, turn_fails=0.1, environment_breaks=0.02, refused=0.1)
    world = played(seed, faults if faulty else None)
    assert world.steps
    assert {role for _, role in by_group(world)} == {FIRST, SECOND}
    for (_, role), samples in by_group(world).items():
        earned = [rewards(one)[role] for one in samples.values()]
        mean = sum(earned) / len(earned)
        for sample, reward in zip(samples.values(), earned, strict=True):
            (trained,) = {value for _, value in sample.advantages} or {0.0}
            assert trained == pytest.approx(reward - mean)


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_branch_holds_what_its_role_read_and_said_and_nothing_of_the_other(seed):
    world = played(seed)
    for (_, role), samples in by_group(world).items():
        for sample in samples.values():
            tokens = sample.tokens
            assert tokens.token_ids[0] == OPENING[role]
            assert OPENING[SECOND if role == FIRST else FIRST] not in tokens.token_ids
            trained = [turn for turn in sample.trajectory.turn_rewards if turn.role == role]
            assert len(trained) == TURNS // 2
            assert sum(tokens.loss_mask) == sum(turn.end - turn.start for turn in trained)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "turn", "reinforce++"])
def test_what_both_earn_together_says_nothing_of_either(advantage):
    """The reward of the episode is the mean of both; with it the second, who has lost half of what
    the first has won, would be told that it has played well."""
    world = played(3, advantage=advantage, scale_rewards=None)
    signs = []
    for (_, role), samples in by_group(world).items():
        if role == FIRST:
            continue
        best = max(samples.values(), key=lambda one: rewards(one)[SECOND])
        worst = min(samples.values(), key=lambda one: rewards(one)[SECOND])
        if rewards(best)[SECOND] > rewards(worst)[SECOND]:
            signs.append(best.advantages[0][1] > worst.advantages[0][1])
    assert signs
    assert all(signs)
