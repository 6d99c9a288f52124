"""The prices that a run shows, on turns and steps of which it is known what they cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from libra_cli.core.costs.hindsight import (
    SharedStep,
    TrainedSpan,
    busy_between,
    server_hindsight,
    training_hindsight,
)
from libra_cli.core.costs.server import ServerCost, guessed_cost
from libra_cli.core.evidence import PlayedTurn
from libra_cli.core.types import Bucket

PRIOR = guessed_cost(Bucket("all", 1, 16, 512))
A, B, R = 0.002, 3e-4, 1e-3
"""Seconds of a step, of a sequence in it, and of a request."""


def turns(loads: list[int], *, beside: float = 1.0, stretched: int = 0) -> Iterator[PlayedTurn]:
    """So many turns of 10 tokens at once, one lot after the other; the first ``stretched`` lots
    take ``beside`` times as long."""
    at = 0.0
    for lot, load in enumerate(loads):
        seconds = 10 * (A + B * load) + R * load
        seconds *= beside if lot < stretched else 1.0
        for _ in range(load):
            yield PlayedTurn("a/0", at, at + seconds, 40, 4, 10)
        at += seconds


def part(law: ServerCost, load: float) -> float:
    return law.step_s / law.decode_step_s(load, 45 * load)


def test_few_turns_at_a_low_load_tell_what_a_step_costs_whatever_is_in_it() -> None:
    """One turn of fifty is of a time in which the server is not full."""
    found = server_hindsight(list(turns([16] * 60 + [8, 4, 2, 1])), (), PRIOR)
    true = A / (A + 16 * B)
    assert part(found.law, 16) == pytest.approx(true, abs=0.08)
    assert part(found.least, 16) <= true <= part(found.most, 16)
    for load, of in ((16, 0.03), (4, 0.15)):
        seconds = 10 * found.law.decode_step_s(load, 45 * load) + load * (
            found.law.request_s + 4 * found.law.prefill_token_s
        )
        assert seconds == pytest.approx(10 * (A + B * load) + R * load, rel=of)


def test_a_server_that_was_always_full_leaves_all_of_it_open() -> None:
    found = server_hindsight(list(turns([16] * 60)), (), PRIOR)
    assert part(found.most, 16) - part(found.least, 16) > 0.5
    for law in (found.least, found.most):
        full = found.law.decode_step_s(16, 45 * 16)
        assert law.decode_step_s(16, 45 * 16) == pytest.approx(full, rel=0.02)


def test_what_the_trainer_beside_takes_is_not_the_servers_price() -> None:
    played = list(turns([16, 8, 12, 4] * 20, beside=2.0, stretched=40))
    half = max(turn.ended for turn in played[: len(played) // 2])
    found = server_hindsight(played, [TrainedSpan(0.0, half)], PRIOR)
    assert found.beside == pytest.approx(0.5, abs=0.03)
    assert found.law.decode_step_s(16, 0) < 1.3 * (A + 16 * B)


def test_a_trainer_that_waits_for_parts_slows_servers_in_the_rest_of_its_step_alone() -> None:
    """With k = 0.5, half of the time beside the trainer takes 1 / (1 - 0.5 / 2) times as long."""
    played = list(turns([16, 8, 12, 4] * 20, beside=4 / 3, stretched=40))
    half = max(turn.ended for turn in played[: len(played) // 2])
    found = server_hindsight(played, [TrainedSpan(0.0, half, 0.5)], PRIOR)
    assert found.beside == pytest.approx(0.5, abs=0.03)


def test_without_turns_nothing_is_known_but_the_prior() -> None:
    assert server_hindsight([], (), PRIOR).law == PRIOR


# -- the trainer -----------------------------------------------------------------------------------


def steps(ranks: tuple[int, ...], *, slow: float, crowded: float) -> list[SharedStep]:
    """Steps of which servers worked beside every other one, half of its time."""
    found = []
    for at, number in enumerate(ranks):
        tokens = 5000.0 + 400 * (at % 5)
        alone = 0.1 + 1e-4 * tokens / number * (1 + crowded * (number - 1))
        seconds = alone / (1 - 0.5 * (1 - 1 / slow)) if at % 2 else alone
        found.append(SharedStep(seconds, tokens, number, seconds / 2 if at % 2 else 0.0))
    return found


def test_ranks_that_share_cores_slow_one_another_and_servers_slow_them() -> None:
    found = training_hindsight(steps((1,) * 20 + (2,) * 20, slow=1.6, crowded=0.5), 0.0, 0.0)
    assert found.slowdown == pytest.approx(1.6, rel=0.05)
    assert found.rank_slowdown == pytest.approx(0.5, abs=0.05)
    assert found.token_s == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize("crowded", [0.0, 0.5])
def test_of_one_number_of_ranks_what_is_assumed_of_others_changes_nothing(crowded: float) -> None:
    found = training_hindsight(steps((2,) * 20, slow=1.6, crowded=0.5), 0.0, crowded)
    assert found.rank_slowdown == crowded
    assert found.slowdown == pytest.approx(1.6, rel=0.05)
    assert found.token_s * (1 + crowded) == pytest.approx(1.5e-4, rel=0.05)


def test_steps_that_servers_always_worked_beside_are_as_slow_as_is_assumed() -> None:
    alike = [SharedStep(0.6, 5000.0, 1, 0.6)] * 20
    assert training_hindsight(alike, 0.5, 0.0).slowdown > 1.5
    assert training_hindsight(alike, 0.0, 0.0).slowdown < 1.1
    with pytest.raises(ValueError, match="no step"):
        training_hindsight([], 0.0, 0.0)


def test_servers_are_busy_while_any_of_them_has_a_turn() -> None:
    played = [
        PlayedTurn("a/0", 0.0, 2.0, 10, 10, 5),
        PlayedTurn("a/1", 1.0, 4.0, 10, 10, 5),
        PlayedTurn("a/0", 6.0, 7.0, 10, 10, 5),
    ]
    spans = [TrainedSpan(0.0, 10.0), TrainedSpan(3.0, 6.5), TrainedSpan(8.0, 9.0)]
    assert busy_between(played, spans) == pytest.approx([5.0, 1.5, 0.0])
    assert busy_between(played, [TrainedSpan(0.0, 10.0, 0.4)]) == pytest.approx([2.0])
    assert busy_between([], [TrainedSpan(0.0, 1.0)]) == [0.0]
