"""``staleness: auto``: what a bound that changes while a run goes on promises, and keeps."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.actions import End
from libra_cli.core.records import DecisionRecord
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.staleness import cut, hold
from libra_cli.core.run.state import Resume
from libra_cli.core.types import TrajectoryId, VersionSpan
from tests.world import FEW_RUNS, Faults, World, explained_bound, recipe

SIZE = 4


def world(seed: int, faults: Faults, **more: Any) -> World:
    training = {"staleness": "auto", **more}
    settled = recipe(rollout={"group_size": SIZE}, training=training)
    return AgesSeen(Random(seed), faults, recipe=settled)


class AgesSeen(World):
    """Checks every batch: how far behind a group is, and that none older was left."""

    def _do_train(self, action: a.Train) -> None:
        ledger = self.machine.ledger
        batch = [group for group in self.machine.training.batch.groups if not group.is_rest]
        for group in batch:
            behind = action.held.step - group.oldest
            assert behind <= group.rule.bound, f"{group} is {behind} behind"
        left = [group for group in ledger.groups.values() if group.state.value == "ready"]
        assert not (batch and left) or (
            max(group.oldest for group in batch) <= min(group.oldest for group in left)
        ), "a younger group was taken before an older one"
        super()._do_train(action)


@FEW_RUNS
@given(seed=st.integers(0, 2**32), first=st.integers(0, 4))
def test_no_group_is_trained_further_behind_than_the_bound_it_was_opened_under(seed, first):
    """Not so members that come after their group was closed."""
    run = world(seed, Faults(bounded=0.05), max_staleness=first).run()
    assert run.end == End("finished", "")
    assert len({group for group, _ in run.trained}) == 15


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_any_run_whose_bound_changes_ends(seed):
    faults = Faults(bounded=0.05, server_dies=0.005, trainer_dies=0.005, replanned=0.01)
    settled = recipe(rollout={"group_size": SIZE}, training={"staleness": "auto"})
    run = World(Random(seed), faults, recipe=settled).run()
    assert run.end is not None


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_run_that_goes_on_has_the_bound_that_was_chosen_last(seed):
    first = world(seed, Faults(bounded=0.05, stop_asked=0.01)).run()
    if not first.ledgers:
        return
    path, position = list(first.ledgers.items())[-1]
    rows = [row for row in first.records if isinstance(row, DecisionRecord)]
    resume = Resume(path, position, records=first.records)
    second = World(Random(seed + 1), recipe=first.recipe, resume=resume)
    expected = rows[-1].bound if rows else 1
    assert second.machine.ledger.rule.bound == second.machine.controller.bound == expected
    fixed = recipe(rollout={"group_size": SIZE}, training={"max_staleness": 3})
    third = World(Random(seed + 1), recipe=fixed, resume=replace(resume))
    assert third.machine.ledger.rule == cut(3)


def test_a_lower_bound_drains_and_a_higher_one_opens_more() -> None:
    ledger = GroupLedger(group_size=1, groups_per_step=2, rule=cut(1), retries=0)
    opened = [ledger.open(version=0, now=0.0) for _ in range(4)]
    assert not ledger.may_open
    ledger.rule = cut(2)
    assert ledger.may_open
    ledger.rule = hold(0)
    assert not ledger.may_open
    for number, group in enumerate(opened):
        group.members[0].add_span(VersionSpan(0, 0, 1))
        ledger.finish(TrajectoryId(group.id, 0), float(number))
    assert ledger.expire(1) == [], "they keep the bound of 1 under which they were opened"
    assert ledger.claim(1) == opened[:2]
    ledger.trained(1)
    assert not ledger.may_open
    assert ledger.claim(2) == opened[2:]
    ledger.trained(2)
    ledger.published(2)
    assert ledger.may_open
    assert ledger.open(version=2, now=0.0).rule == hold(0)


def test_a_bound_that_is_chosen_is_written_down_and_told_once() -> None:
    run = world(0, Faults())
    run.play(40)
    run.give(e.PlanKept("near", explanation=explained_bound(4)))
    assert run.machine.ledger.rule == cut(4)
    (row,) = [one for one in run.records if isinstance(one, DecisionRecord) and one.bound == 4]
    assert row.explanation is not None
    assert row.explanation.bound is not None
    assert row.explanation.bound.why == "at random"
