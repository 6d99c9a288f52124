"""A trajectory whose agent leaves its conversation: branches, each a sample, each token once."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import IllegalMove
from libra_cli.core.actions import End
from libra_cli.core.events import TurnGenerated
from libra_cli.core.rollout.rows import trajectory_record
from libra_cli.core.rollout.turns import (
    add_turn,
    append_turn,
    earned_by_roles,
    extend_masked,
    go_on_at,
)
from libra_cli.core.types import (
    BranchPoint,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from libra_cli.runtime.trainer.client import pack_sample
from tests.world import FEW_RUNS, Faults, World

WHO = TrajectoryId(0, 0)


def observe(trajectory: Trajectory, *tokens: int) -> None:
    trajectory.token_ids.extend(tokens)
    extend_masked(trajectory, len(tokens))


def say(trajectory: Trajectory, *tokens: int, version: int = 1) -> None:
    key = WeightVersion(0, version)
    append_turn(
        trajectory,
        TurnGenerated(
            request=1,
            trajectory=WHO,
            slot="a/0",
            incarnation=0,
            prompt_ids=trajectory.token_ids[:],
            token_ids=array("i", tokens),
            logprobs=array("f", [-0.5] * len(tokens)),
            spans=(VersionSpan(version, 0, len(tokens)),),
            newest=key,
            cache_key=key,
            finish_reason="stop",
            started_at=0.0,
        ),
    )


def begun() -> Trajectory:
    trajectory = Trajectory(WHO)
    observe(trajectory, 1, 2, 3)
    say(trajectory, 10, 11)
    return trajectory


def test_the_end_of_the_branch_that_goes_on_changes_nothing():
    trajectory = begun()
    go_on_at(trajectory, BranchPoint(0, 5))
    assert trajectory.others == {}
    assert trajectory.branches == [trajectory]


def test_a_new_branch_begins_with_the_exact_tokens_and_trains_on_none_of_them():
    trajectory = begun()
    observe(trajectory, 4)
    say(trajectory, 12)
    go_on_at(trajectory, BranchPoint(0, 5))
    observe(trajectory, 5)
    say(trajectory, 13, 14, version=2)
    first, second = trajectory.branches
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 12]
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert second is trajectory
    assert second.token_ids.tolist() == [1, 2, 3, 10, 11, 5, 13, 14]
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert second.logprobs.tolist() == [0.0] * 6 + [-0.5] * 2
    assert trajectory.generated == 5
    assert (trajectory.min_version, trajectory.max_version) == (1, 2)
    assert first.single_version == WeightVersion(0, 1)
    assert second.single_version == WeightVersion(0, 2)
    assert trajectory.all_tokens == 15


def test_a_branch_that_was_left_goes_on_where_it_ended():
    trajectory = begun()
    go_on_at(trajectory, BranchPoint(0, 0))
    observe(trajectory, 7, 8)
    say(trajectory, 20)
    go_on_at(trajectory, BranchPoint(0, 5))
    observe(trajectory, 4)
    say(trajectory, 12)
    assert trajectory.number == 0
    assert trajectory.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 12]
    assert trajectory.others[1].token_ids.tolist() == [7, 8, 20]
    go_on_at(trajectory, BranchPoint(1, 2))
    assert sorted(trajectory.others) == [0, 1]
    assert (trajectory.number, trajectory.token_ids.tolist()) == (2, [7, 8])


@pytest.mark.parametrize("point", [BranchPoint(0, 6), BranchPoint(1, 0), BranchPoint(0, -1)])
def test_a_point_that_is_nowhere_in_the_trajectory_is_a_bug(point):
    with pytest.raises(IllegalMove):
        go_on_at(begun(), point)


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_agents_that_fork_train_every_generated_token_exactly_once(seed):
    world = World(Random(seed), Faults(forked=0.6, replanned=0.02)).run()
    assert world.end == End("finished", "")
    trained = Counter[TrajectoryId]()
    generated = {}
    for sample in world.samples:
        trained[sample.trajectory.id] += sum(sample.tokens.loss_mask)
        generated[sample.trajectory.id] = sample.trajectory.generated
        packed = pack_sample(sample)
        assert len(packed["loss_mask"]) * 4 == len(packed["token_ids"])
    assert trained == generated
    rows = [row for row in world.trajectories if row.state == "finished"]
    assert any(json.loads(row.branches_json) for row in rows)
    for row in rows:
        others = json.loads(row.branches_json)
        assert [number for number, _ in others] == [one.number for one in row.tokens[:-1]]
        for (_, spans), branch in zip(others, row.tokens, strict=False):
            assert spans == [[one.version, one.start, one.end] for one in branch.spans]
            assert all(0 <= start <= end <= len(branch.token_ids) for _, start, end in spans)
        assert row.context_tokens == sum(len(branch.token_ids) for branch in row.tokens)


def test_each_role_has_its_branch_its_turns_and_its_rewards():
    trajectory = Trajectory(WHO, role="first")
    observe(trajectory, 1, 2, 3)
    say(trajectory, 10, 11)
    add_turn(trajectory, 2, anchor=0)
    go_on_at(trajectory, BranchPoint(0, 0))
    trajectory.role = "second"
    observe(trajectory, 7)
    say(trajectory, 20)
    add_turn(trajectory, 1, anchor=0)
    earned_by_roles(trajectory, {"first": 0.5})
    go_on_at(trajectory, BranchPoint(0, 5))
    assert trajectory.role == "first"
    observe(trajectory, 4)
    say(trajectory, 12)
    add_turn(trajectory, 1, anchor=0)
    earned_by_roles(trajectory, {"first": 1.0, "second": -1.0})
    told = [(one.role, one.branch, one.reward) for one in trajectory.turn_rewards]
    assert told == [("first", 0, 0.5), ("second", 1, -1.0), ("first", 0, 1.0)]
    row = trajectory_record(trajectory, "finished", ended_at=1.0)
    assert [one.number for one in row.tokens] == [1, 0]
    assert json.loads(row.roles_json) == ["second", "first"]


def test_without_roles_none_is_written():
    row = trajectory_record(begun(), "finished", ended_at=1.0)
    assert json.loads(row.roles_json) == []
