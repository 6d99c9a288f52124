"""What is made of the steps of a run, libra's or a peer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.config.errors import LibraError
from tests.research.peers import runs as peers
from tests.research.peers.report import peers_report


def played(rewards: list[float], late: float = 0.0) -> peers._Played:
    """Steps of 2 s, the first of which ends 10 s after the launch."""
    steps = [(110.0 + 2 * at, reward, at - late) for at, reward in enumerate(rewards)]
    return peers._Played(100.0, steps)


def test_a_step_is_timed_without_the_first_and_learning_from_the_launch():
    row = peers._row("libra", 0.0, 0, played([0.2] * 5 + [0.7] * 5 + [0.9] * 2))
    assert (row.step_s, row.first_s) == (2.0, 10.0)
    assert row.success_s == 10.0 + 2 * 9  # the tenth step is the fifth in a row
    assert row.reward == pytest.approx(0.78)


def test_a_run_that_has_not_learned_says_so():
    row = peers._row("trl", 0.02, 1, played([0.2] * 8))
    assert row.success_s is None
    (sheet,) = peers_report([row]).sheets
    assert sheet.rows == [("trl", "0.02", "1", "2", "10", "never", "0.200", "0.200", "0.200")]


def test_tokens_of_an_older_policy_count_for_the_policy_that_generated_them():
    rises = [0.1 * step for step in range(8)]
    now = peers._row("trl", 0.0, 0, played(rises))
    later = peers._row("libra", 0.0, 0, played([0.0, *rises[:-1]], late=1.0))
    assert later.area < now.area - 0.08
    assert later.by_policy == pytest.approx(now.by_policy) == pytest.approx(0.3)


def test_what_was_learned_is_compared_seed_by_seed():
    rows = [
        peers._row(who, 0.0, seed, played(rewards))
        for who, seed, rewards in [
            ("libra", 0, [0.2] * 5 + [0.6] * 5),
            ("trl", 0, [0.2] * 5 + [0.5] * 5),
            ("libra", 1, [0.4] * 5 + [0.9] * 5),
            ("trl", 1, [0.4] * 5 + [0.6] * 5),
            ("libra", 2, [0.0] * 10),  # its peer was not run
        ]
    ]
    reward, area, _ = peers.differences(rows)
    assert (reward.number, reward.seeds, area.number, area.seeds) == ("reward", 2, "area", 2)
    assert reward.mean == pytest.approx(0.2)
    assert area.mean == pytest.approx(0.1)
    # the interval of 0.1 and 0.3: their standard error, 0.1, times Student's t of one degree
    assert reward.ci95 == pytest.approx((0.2 - 1.2706, 0.2 + 1.2706), abs=1e-4)
    body = peers_report(rows).body
    assert [row["rewards"][0] for row in body["peers"]] == [0.2, 0.2, 0.4, 0.4, 0.0]
    assert [one["seeds"] for one in body["differences"]] == [2, 2, 2]


def test_differences_are_none_where_one_alone_ran():
    assert peers.differences([peers._row("trl", 0.0, 0, played([0.2] * 8))]) == []


def test_a_recipe_that_a_peer_cannot_play_is_refused_before_anything_starts():
    recipe = Path(__file__).parents[3] / "recipes" / "two-gpus.yaml"
    with pytest.raises(LibraError, match="pointer-chase"):
        peers.peers(recipe, latencies=[0.0], seeds=[0], steps=5, progress=lambda text: None)


def test_a_contender_that_does_not_exist_is_refused():
    recipe = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    with pytest.raises(LibraError, match="no contender verl"):
        peers.peers(
            recipe,
            latencies=[0.0],
            seeds=[0],
            steps=5,
            contenders=["verl"],
            progress=lambda text: None,
        )
