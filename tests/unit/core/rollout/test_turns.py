"""What is kept of each turn, and of how long contexts are."""

from __future__ import annotations

import pytest

from libra_cli.core import actions as a
from libra_cli.core.records import TrajectoryRecord
from libra_cli.core.rollout.trajectories import _ForgettingMean
from libra_cli.core.rollout.turns import digest_of
from tests.elastic import scene


def test_what_was_observed_long_ago_counts_less():
    mean = _ForgettingMean(10.0)
    mean.add(20.0, weight=3.0)
    assert mean.value == pytest.approx((0.99 * 10 + 20 * 3) / (0.99 + 3))
    mean.add(40.0, weight=1.0)
    assert mean.value == pytest.approx((0.99**2 * 10 + 0.99 * 60 + 40) / (0.99**2 + 0.99 * 3 + 1))


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
