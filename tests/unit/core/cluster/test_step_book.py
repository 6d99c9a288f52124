"""How long the trainer is waited for, by what it took before."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from libra_cli.core.cluster.step_book import PATIENCE_S, StepBook
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.staleness import hold
from tests.world import World, recipe

NOW = 50_000.0


@pytest.mark.parametrize("took_s", [PATIENCE_S / 4, PATIENCE_S])
def test_a_checkpoint_is_waited_for_twice_as_long_as_the_slowest_took(took_s):
    book = StepBook(GroupLedger(group_size=1, groups_per_step=1, rule=hold(0), retries=1))
    assert book.patience_s == PATIENCE_S
    for seconds in (took_s, took_s / 2):
        book.save_asked(now=NOW)
        book.saved(now=NOW + seconds)
    assert book.patience_s == max(PATIENCE_S, 2 * took_s)


def test_lengths_are_those_of_members_with_a_reward_and_are_told_once():
    ledger = GroupLedger(group_size=2, groups_per_step=1, rule=hold(0), retries=1)
    first, second = ledger.open(version=0, now=NOW).members
    first.generated, second.generated = 7, 9
    ledger.finish(first.id, 1.0)
    assert ledger.take_lengths() == [7]
    ledger.finish(second.id, 0.0)
    assert ledger.take_lengths() == [9]
    assert ledger.take_lengths() == []


def test_a_step_is_held_back_only_where_older_weights_may_still_play():
    """With a full batch there, for groups that would be too old for the next step."""
    held = {
        bound: [step.held_s for step in World(Random(0), recipe=recipe(training=rule)).run().steps]
        for bound, rule in ((0, {"max_staleness": 0}), (1, {"max_staleness": 1}))
    }
    assert {*held[0]} == {0.0}
    assert max(held[1]) > 0.0


def test_speed_is_that_of_generated_tokens_since_the_last_step() -> None:
    by_number = {one.step: one for one in World(Random(0)).run().steps}
    for before, step in pairwise(by_number.values()):
        since = step.ended_at - before.ended_at
        assert step.tokens_per_s == pytest.approx(step.generated_tokens / since)
