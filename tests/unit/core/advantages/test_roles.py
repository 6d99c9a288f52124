"""Advantages by role: a role of a trajectory is compared with the same role of the others."""

from __future__ import annotations

from math import sqrt
from statistics import fmean

import pytest

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup
from libra_cli.core.advantages.roles import by_role, estimated_by_role
from libra_cli.core.advantages.scales import STD_FLOOR
from libra_cli.core.algorithms.grpo import grpo
from libra_cli.core.algorithms.reinforce import reinforce_plus_plus
from libra_cli.core.algorithms.rloo import rloo
from libra_cli.core.algorithms.turn import turn
from libra_cli.core.sampling.dynamic import FilteredGroups
from libra_cli.core.types import Outcome, TurnReward


def played(*turns: tuple[str, float], tokens: int = 2) -> Outcome:
    """The outcome of turns of (role, reward), each of some tokens in the branch of its role."""
    branches = list(dict.fromkeys(role for role, _ in turns))
    taken = tuple(
        TurnReward(branches.index(role), 9 * at, 9 * at + tokens, reward, role=role)
        for at, (role, reward) in enumerate(turns)
    )
    rewards = {role: sum(x for who, x in turns if who == role) for role in branches}
    return Outcome(fmean(rewards.values()), tokens * len(turns), taken)


# A game for two, dealt once and played by three pairs. What one gains the other loses, so the mean
# over both is 0:
#   member 0   first (a, b) wins 2     second (a) loses 2
#   member 1   first (a) wins 1        second (a) loses 1
#   member 2   first (a) loses 1       second (a, b) wins 1
# First:  mean (2 + 1 - 1) / 3 = 2/3, deviations 4/3, 1/3, -5/3; sum of squares 42/9, s = sqrt(7/3).
# Second: the same with the other sign.
GAME = ComparedGroup(
    (
        played(("first", 0.0), ("second", -2.0), ("first", 2.0)),
        played(("first", 1.0), ("second", -1.0)),
        played(("first", 0.0), ("second", 0.0), ("first", -1.0), ("second", 1.0)),
    )
)
DEVIATIONS = (4 / 3, 1 / 3, -5 / 3)


def test_grpo_compares_each_role_with_itself():
    (members,) = estimated_by_role(grpo, [GAME], TrainingSpec())
    a, b, c = (x / (sqrt(7 / 3) + STD_FLOOR) for x in DEVIATIONS)
    expected = [(a, -a, a), (b, -b), (c, -c, c, -c)]
    for values, wanted in zip(members, expected, strict=True):
        assert values == pytest.approx(wanted)


def test_without_scale_it_is_the_reward_less_the_mean_of_the_role():
    (members,) = estimated_by_role(grpo, [GAME], TrainingSpec(scale_rewards="none"))
    for values, x in zip(members, DEVIATIONS, strict=True):
        assert values[:2] == pytest.approx((x, -x))


def test_spirals_advantage_with_the_mean_of_the_others_for_its_average():
    # SPIRAL: A_p = R_p - b_p, b_p an estimate of E[R_p | game, role]. With the mean of the other
    # members as b_p, first of member 0: 2 - (1 - 1) / 2 = 2; second of member 2: 1 - (-3/2) = 5/2.
    (members,) = estimated_by_role(rloo, [GAME], TrainingSpec())
    assert members[0] == pytest.approx((2.0, -2.0, 2.0))
    assert members[2][1] == members[2][3] == pytest.approx(5 / 2)


def test_what_a_role_earned_before_a_turn_is_not_in_the_turns_return():
    (members,) = estimated_by_role(turn, [GAME], TrainingSpec(scale_rewards="none"))
    # First has a second turn in members 0 and 2: returns 2 and -1, mean 1/2.
    assert members[0][2] == pytest.approx(2 - 1 / 2)
    assert members[2][2] == pytest.approx(-1 - 1 / 2)


def test_a_normalised_batch_has_mean_0_over_the_tokens_of_each_role():
    (members,) = estimated_by_role(reinforce_plus_plus, [GAME], TrainingSpec())
    for role in ("first", "second"):
        values = [
            value
            for one, row in zip(GAME.members, members, strict=True)
            for turn_, value in zip(one.turns, row, strict=True)
            if turn_.role == role
        ]
        assert fmean(values) == pytest.approx(0.0, abs=1e-9)


def test_groups_without_roles_are_estimated_as_if_there_were_no_others():
    plain = ComparedGroup((Outcome(1.0, 4), Outcome(0.0, 4)))
    alone = grpo([plain], TrainingSpec())
    beside = estimated_by_role(grpo, [plain, GAME, plain], TrainingSpec())
    assert [beside[0], beside[2]] == [*alone, *alone]
    assert estimated_by_role(grpo, [plain], TrainingSpec()) == alone


def test_a_role_that_did_not_speak_in_a_member_is_compared_without_it():
    folded = played(("first", -1.0))
    group = ComparedGroup((*GAME.members, folded))
    (members,) = estimated_by_role(grpo, [group], TrainingSpec(scale_rewards="none"))
    assert members[3] == pytest.approx((-1 - 1 / 4,))
    assert members[0][1] == pytest.approx(-4 / 3)


def test_a_late_member_is_compared_with_the_role_of_those_that_ended_before():
    late = ComparedGroup(GAME.members[:1], before=GAME.members[1:])
    ((values,),) = estimated_by_role(grpo, [late], TrainingSpec(scale_rewards="none"))
    assert values == pytest.approx((2.0, -2.0, 2.0))


def test_a_game_whose_gains_cancel_out_has_signal_by_role():
    assert {one.reward for one in GAME.members} == {0.0}
    assert [len(part.members) for part in by_role(GAME)] == [3, 3]
    assert FilteredGroups().finds_signal(GAME)
    same = ComparedGroup((GAME.members[1], GAME.members[1]))
    assert not FilteredGroups().finds_signal(same)
