"""The experts that servers chose, on their way from turns to the trainer."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from libra_cli.core.actions import TrainSample
from libra_cli.core.events import TurnGenerated
from libra_cli.core.rollout.turns import ABORTED, append_turn, extend_masked, go_on_at, joined
from libra_cli.core.types import (
    Branch,
    BranchPoint,
    ChosenExperts,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from libra_cli.node.batch.samples import read_sample
from libra_cli.runtime.trainer.client import pack_sample

WHO, KEY = TrajectoryId(0, 0), WeightVersion(0, 1)


def routes(start: int, end: int, *, said: int = 0, code: str = "B") -> ChosenExperts:
    """Two layers of one expert each, whose numbers say the token and who said it."""
    ids = [number for token in range(start, end) for number in (token, said)]
    return ChosenExperts(start, 2, 1, array(code, ids))


def turn_of(trajectory: Trajectory, said: int, told: ChosenExperts | None) -> TurnGenerated:
    return TurnGenerated(
        request=1,
        trajectory=WHO,
        slot="a/0",
        incarnation=0,
        prompt_ids=trajectory.token_ids[:],
        token_ids=array("i", range(said)),
        logprobs=array("f", [-0.5] * said),
        spans=(VersionSpan(1, 0, said),),
        newest=KEY,
        cache_key=KEY,
        finish_reason="stop",
        started_at=0.0,
        routes=told,
    )


def begun() -> Trajectory:
    """Three tokens of a prompt and two generated ones, of which nothing is known of the last."""
    trajectory = Trajectory(id=WHO)
    trajectory.token_ids.extend([1, 2, 3])
    extend_masked(trajectory, 3)
    append_turn(trajectory, turn_of(trajectory, 2, routes(0, 4)))
    return trajectory


def tokens_of(branch: Branch) -> list[tuple[int, int]]:
    assert branch.routes is not None
    ids = branch.routes.ids
    return [(ids[at], ids[at + 1]) for at in range(0, len(ids), 2)]


def test_a_next_turn_adds_what_was_not_known_and_keeps_the_first_choice_of_a_token() -> None:
    trajectory = begun()
    trajectory.token_ids.append(4)
    extend_masked(trajectory, 1)
    append_turn(trajectory, turn_of(trajectory, 2, routes(2, 7, said=1)))
    assert tokens_of(trajectory) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert trajectory.routes is not None
    assert trajectory.routes.end == 7


@pytest.mark.parametrize(
    "told",
    [routes(5, 7), routes(4, 7, code="H"), ChosenExperts(4, 1, 1, array("B", [1, 2, 3])), None],
)
def test_what_does_not_go_on_from_there_is_left_out(told: ChosenExperts | None) -> None:
    trajectory = begun()
    append_turn(trajectory, turn_of(trajectory, 2, told))
    assert len(tokens_of(trajectory)) == 4


def test_routes_that_begin_later_than_the_tokens_are_none() -> None:
    trajectory = Trajectory(id=WHO)
    append_turn(trajectory, turn_of(trajectory, 2, routes(1, 2)))
    assert trajectory.routes is None


def test_the_turn_itself_is_not_changed_by_later_ones() -> None:
    trajectory, first = Trajectory(id=WHO), routes(0, 1)
    append_turn(trajectory, turn_of(trajectory, 2, first))
    append_turn(trajectory, turn_of(trajectory, 2, routes(1, 3)))
    assert first.end == 1


def test_a_new_branch_begins_with_what_is_known_of_its_tokens() -> None:
    trajectory = begun()
    go_on_at(trajectory, BranchPoint(0, 2))
    assert tokens_of(trajectory) == [(0, 0), (1, 0)]
    assert len(tokens_of(trajectory.others[0])) == 4


def test_a_turn_in_two_halves_has_the_experts_of_both() -> None:
    trajectory = Trajectory(id=WHO)
    trajectory.token_ids.extend([1, 2])
    extend_masked(trajectory, 2)
    half = replace(turn_of(trajectory, 2, routes(0, 3)), finish_reason=ABORTED)
    rest = replace(
        turn_of(trajectory, 2, routes(0, 5, said=1)), prompt_ids=array("i", [1, 2, 0, 1])
    )
    append_turn(trajectory, joined([half, rest]))
    assert tokens_of(trajectory) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize("code", ["B", "H"])
def test_a_trainer_reads_what_is_sent(code: str) -> None:
    trajectory = Trajectory(id=WHO, reward=1.0)
    trajectory.token_ids.extend([1, 2, 3])
    extend_masked(trajectory, 3)
    append_turn(trajectory, turn_of(trajectory, 2, routes(0, 4, code=code)))
    sample = read_sample(pack_sample(TrainSample(trajectory, 1, True, ())), max_len=8)
    assert sample.routes is not None
    assert sample.routes.itemsize == array(code).itemsize
    np.testing.assert_array_equal(sample.routes[:, 0, 0], range(4))


def test_a_trainer_is_sent_none_where_none_are_known() -> None:
    trajectory = Trajectory(id=WHO, reward=1.0)
    trajectory.token_ids.append(1)
    extend_masked(trajectory, 1)
    append_turn(trajectory, turn_of(trajectory, 2, None))
    assert read_sample(pack_sample(TrainSample(trajectory, 1, True, ())), max_len=8).routes is None
