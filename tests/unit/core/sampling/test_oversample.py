"""Oversampling: a group is ready with the first of its members that end; the others are stopped."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core.records import GroupRecord
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.once import check_once
from libra_cli.core.rollout.staleness import cut, hold
from libra_cli.core.run.state import Resume
from tests.world import Faults, World, recipe

FEWER = settings(max_examples=settings().max_examples // 10)
SEEDS = st.integers(0, 2**32)
FAULTS = st.builds(
    Faults,
    environment_breaks=st.sampled_from([0.0, 0.05]),
    trainer_dies=st.sampled_from([0.0, 0.003]),
    server_dies=st.sampled_from([0.0, 0.003]),
)


class Watched(World):
    """Knows which generations were broken off."""

    aborted: frozenset[int] = frozenset()

    def _do_abort_turn(self, action):
        self.aborted = self.aborted | {action.request}
        super()._do_abort_turn(action)


def oversampled(rule="hold"):
    return recipe(
        rollout={"group_size": 2, "oversample": 2, "buckets": [{"name": "all", "max_num_seqs": 6}]},
        training={"staleness": rule},
    )


@FEWER
@given(seed=SEEDS, faults=FAULTS, rule=st.sampled_from(["hold", "cut"]))
def test_every_group_trains_its_size_and_no_more(seed, faults, rule):
    world = World(Random(seed), faults, recipe=oversampled(rule)).run()
    newest = {step.step: step.groups_json for step in world.steps}
    assert len(newest) <= 5
    for step in newest:
        last = [(group, member) for group, member, at in world.members if at == step]
        assert max(Counter(group for group, _ in set(last[-8:])).values(), default=2) <= 2
    assert check_once(world.records) == []


@FEWER
@given(seed=SEEDS)
def test_the_surplus_is_stopped_told_and_never_scored(seed):
    world = Watched(Random(seed), recipe=oversampled())
    world.run()
    assert world.end == a.End("finished", "")
    stopped = [row for row in world.trajectories if row.detail == "its group was full without it"]
    assert stopped
    assert all(row.state == "dropped" and row.reward is None for row in stopped)
    ready = [row for row in world.rows(GroupRecord) if row.state == "ready"]
    assert {row.detail for row in ready} == {"2 surplus members were stopped"}
    assert world.aborted
    assert all("surplus_tokens" in step.batch for step in world.steps)


@FEWER
@given(seed=SEEDS)
def test_a_run_that_goes_on_trains_every_group_once(seed):
    first = World(Random(seed), Faults(stop_asked=0.005), recipe=oversampled()).run()
    if not first.ledgers:
        return
    path, position = list(first.ledgers.items())[-1]
    second = World(
        Random(seed),
        recipe=first.recipe,
        resume=Resume(path, position, records=first.records),
        ledgers={path: position},
    ).run()
    before = [group for group, step in first.trained if step <= position["step"]]
    trained = before + [group for group, _ in second.trained]
    assert len(trained) == len(set(trained))


def test_what_a_closed_group_leaves_is_full_with_the_members_that_were_missing():
    ledger = GroupLedger(group_size=4, groups_per_step=1, rule=cut(1), retries=1, oversample=2)
    group = ledger.open(version=0, now=0.0)
    for member in group.members:
        member.min_version = 0
    first, second, third, *_ = (member.id for member in group.members)
    ledger.finish(first, 1.0)
    ledger.finish(second, 0.0)
    assert ledger.close(2) == [group]
    assert group.missing == 2
    rest = ledger.rests[group.id]
    assert len(rest.members) == 4
    ledger.finish(third, 1.0)
    assert str(rest.state) == "open"
    ledger.finish(rest.members[-1].id, 1.0)
    assert (str(rest.state), rest.surplus, len(rest.members)) == ("ready", 2, 2)
    ledger.check()


def test_a_group_that_is_played_again_has_attempts_of_its_own():
    ledger = GroupLedger(group_size=2, groups_per_step=1, rule=hold(0), retries=1, oversample=1)
    group = ledger.open(version=0, now=0.0)
    for member in group.members[:2]:
        ledger.finish(member.id, 1.0)
    assert ledger.expire(2) == [group]
    again = ledger.open(version=2, now=1.0)
    assert [member.id.attempt for member in again.members] == [1, 1, 1]
