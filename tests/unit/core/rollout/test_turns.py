"""What is kept of each turn, and of how long contexts are."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from libra_cli.core import actions as a
from libra_cli.core.events import TurnGenerated
from libra_cli.core.records import TrajectoryRecord, TurnRecord
from libra_cli.core.rollout.active import ActiveTrajectory
from libra_cli.core.rollout.trajectories import _ForgettingMean
from libra_cli.core.rollout.turns import append_turn, digest_of
from libra_cli.core.types import Trajectory, TrajectoryId, VersionSpan, WeightVersion
from tests.elastic import scene


def test_what_was_observed_long_ago_counts_less():
    mean = _ForgettingMean(10.0)
    mean.add(20.0, weight=3.0)
    assert mean.value == pytest.approx((0.99 * 10 + 20 * 3) / (0.99 + 3))
    mean.add(40.0, weight=1.0)
    assert mean.value == pytest.approx((0.99**2 * 10 + 0.99 * 60 + 40) / (0.99**2 + 0.99 * 3 + 1))


def turn(begun_with: int, newest: int, *spans: int) -> TurnGenerated:
    """One whose tokens are of these versions, a token each."""
    key = WeightVersion(1, begun_with)
    tokens = array("i", range(len(spans)))
    return TurnGenerated(
        request=1,
        trajectory=TrajectoryId(0, 0),
        slot="a/0",
        incarnation=0,
        prompt_ids=array("i"),
        token_ids=tokens,
        logprobs=array("f", [-1.0] * len(spans)),
        spans=tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(spans)),
        newest=WeightVersion(1, newest),
        cache_key=key,
        finish_reason="stop",
        started_at=0.0,
    )


@pytest.mark.parametrize(
    ("turns", "version"),
    [
        ([(2, 2, 2)], 2),
        ([(2, 2, 2), (2, 2, 2)], 2),
        ([(2, 2, 2), (3, 3, 3)], None),
        ([(2, 3, 2), (2, 2, 2)], None),  # a newer one was loaded meanwhile, if for no token
        ([(2, 2, 1), (2, 2, 2)], None),  # the first token was of an older one
        ([(2, 2, 2), (2, 2, 1)], None),
    ],
)
def test_a_trajectory_is_of_one_version_if_each_of_its_turns_is_throughout(turns, version):
    trajectory = Trajectory(TrajectoryId(0, 0))
    trajectory.token_ids.extend([0])
    for begun_with, newest, token in turns:
        said = turn(begun_with, newest, token)
        append_turn(trajectory, replace(said, prompt_ids=trajectory.token_ids[:]))
    expected = None if version is None else WeightVersion(1, version)
    assert trajectory.single_version == expected


@pytest.mark.parametrize(("kv", "version"), [(None, 6), (6, 6), (5, None)])
def test_tokens_after_kv_of_older_weights_are_of_no_single_version(kv, version):
    trajectory = Trajectory(TrajectoryId(0, 0))
    since = None if kv is None else WeightVersion(1, kv)
    append_turn(trajectory, turn(6, 6, 6), kv=since)
    assert trajectory.single_version == (version and WeightVersion(1, version))


def test_a_turn_is_known_by_what_it_was_shown_last():
    world = scene()
    active = world.machine.rollout.active
    world.until(lambda: any(one.trajectory.turns == 2 for one in active.values()))
    trajectory = next(one.trajectory for one in active.values() if one.trajectory.turns == 2)
    first, second = trajectory.turn_rewards
    tokens = trajectory.token_ids
    assert first.anchor == digest_of(tokens[: first.start])
    assert second.anchor == digest_of(tokens[first.end : second.start])


def test_a_context_is_half_grown_on_average_in_each_of_its_turns(monkeypatch):
    world = scene()
    added = []
    mean = world.machine.rollout._mean_context
    monkeypatch.setattr(mean, "add", lambda value, weight: added.append((value, weight)))
    known = len(world.rows(TrajectoryRecord))
    world.until(lambda: added)
    rows = world.rows(TrajectoryRecord)[known:]
    (row,) = [row for row in rows if row.state == "finished"]
    of_it = (row.group_id, row.member)
    asked = [one for one in world.did(a.Generate) if tuple(one.trajectory)[:2] == of_it]
    assert added == [((len(asked[0].prompt_ids) + row.context_tokens) / 2, row.turns)]


def test_the_time_in_environments_is_counted_apart_from_that_on_servers():
    world = scene()
    world.steps_on()
    ended = [row for row in world.rows(TrajectoryRecord) if row.state == "finished"]
    assert ended
    for row in ended:
        turns = [one for one in world.rows(TurnRecord) if one.group_id == row.group_id]
        mine = [one for one in turns if (one.member, one.attempt) == (row.member, row.attempt)]
        served = sum(turn.ended_at - turn.queued_at for turn in mine)
        assert row.environment_s > 0
        assert row.environment_s + served == pytest.approx(row.ended_at - row.started_at)


def test_a_trajectory_tells_what_it_has_waited_for_a_place_in_all():
    active = ActiveTrajectory(Trajectory(TrajectoryId(0, 0), started_at=5.0), asked_at=5.0)
    active.came_back(9.0, 3.0)
    active.asked_at = 20.0
    active.came_back(22.0, 4.5)
    active.came_back(22.5, 4.5)  # a limit is reached, so it is scored
    assert (active.trajectory.environment_s, active.trajectory.waited_s) == (6.5, 4.5)
