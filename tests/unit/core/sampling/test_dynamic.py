"""Dynamic sampling: groups without signal are not trained, not played again, and not lost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.advantages.protocol import ComparedGroup
from libra_cli.core.records import GroupRecord, NoteRecord
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.once import check_once, dropped_in
from libra_cli.core.rollout.staleness import cut, hold
from libra_cli.core.run.state import Resume
from libra_cli.core.sampling.dynamic import FilteredGroups, has_signal
from libra_cli.core.types import Outcome, TurnReward
from tests.world import Faults, World, algorithm, recipe

FEWER = settings(max_examples=settings().max_examples // 10)
SEEDS = st.integers(0, 2**32)
RULES = st.sampled_from(["hold", "cut", "soft", {"rule": "cut", "rest": "drop"}])


def sampled(*, rule="cut", group_size=3, **rollout):
    return recipe(
        rollout={"dynamic_sampling": True, "group_size": group_size, **rollout},
        training={"staleness": rule},
    )


def filtered(world):
    return [row for row in world.rows(GroupRecord) if row.state == "filtered"]


@FEWER
@given(seed=SEEDS, rule=RULES, faults=st.sampled_from([{}, {"trainer_dies": 0.003}]))
def test_every_group_that_is_trained_has_signal(seed, rule, faults):
    world = World(Random(seed), Faults(**faults), recipe=sampled(rule=rule)).run()
    for step in world.steps:
        assert step.batch["share_without_signal"] == 0.0
    assert check_once(world.records) == []


@FEWER
@given(seed=SEEDS, rule=RULES)
def test_every_group_is_trained_or_filtered_or_on_its_way(seed, rule):
    world = World(Random(seed), recipe=sampled(rule=rule)).run()
    ledger = world.machine.ledger
    gone = {row.group_id for row in filtered(world)}
    trained = {group for group, _ in world.trained}
    left = {*ledger.groups, *ledger.rests, *ledger.queue}
    assert trained | gone | left == set(range(ledger.next_group))
    assert not trained & gone


@FEWER
@given(seed=SEEDS)
def test_what_was_filtered_is_counted_in_the_step_after_it(seed):
    world = World(Random(seed), recipe=sampled(rule="hold")).run()
    steps = {step.step: step for step in world.steps}.values()
    numbers = [{name: value or 0.0 for name, value in step.batch.items()} for step in steps]
    last = max(step.ended_at for step in steps)
    rows = [row for row in filtered(world) if row.ended_at <= last]
    assert sum(batch["groups_filtered"] for batch in numbers) == len(rows)
    generated = {row.group_id: 0 for row in rows}
    for row in world.trajectories:
        if row.group_id in generated and row.state == "finished":
            generated[row.group_id] += row.generated_tokens
    assert sum(batch["filtered_tokens"] for batch in numbers) == sum(generated.values())
    for step, batch in zip(steps, numbers, strict=True):
        tokens = batch["filtered_tokens"]
        assert batch["share_filtered"] == tokens / (tokens + step.generated_tokens)


@FEWER
@given(seed=SEEDS, rule=RULES, heard=st.booleans())
def test_a_run_that_goes_on_plays_no_filtered_group_again_but_what_closed_ones_left(
    seed, rule, heard
):
    first = World(Random(seed), Faults(stop_asked=0.005), recipe=sampled(rule=rule)).run()
    if not first.ledgers:
        return
    path, position = list(first.ledgers.items())[0 if heard else -1]
    second = World(
        Random(seed + 1),
        recipe=first.recipe,
        resume=Resume(path, position, records=first.records),
        ledgers={path: position},
    ).run()
    gone = dropped_in(first.records)
    assert not gone & {row.group_id for row in second.rows(GroupRecord)}
    before = {group for group, step in first.trained if step <= position["step"]}
    after = {group for group, _ in second.trained}
    assert not before & after
    ledger = second.machine.ledger
    closed = {row.group_id for row in [*filtered(first), *filtered(second)]}
    left = {*ledger.groups, *ledger.rests, *ledger.queue}
    assert before | after | closed | left == set(range(ledger.next_group))


class Hopeless(World):
    """Every trajectory fails."""

    def later(self, event, *times, **more):
        if isinstance(event, e.EpisodeAdvanced) and event.done:
            event = replace(event, reward=0.0)
        super().later(event, *times, **more)


def notes(world):
    return [row for row in world.rows(NoteRecord) if row.kind == "sampling"]


def test_a_run_in_which_nothing_has_signal_takes_its_steps_all_the_same_and_says_so():
    world = Hopeless(Random(0), recipe=sampled(rule="hold", max_refills=2)).run()
    assert world.end == a.End("finished", "")
    assert {step.batch["groups_filtered"] for step in world.steps} == {6}
    assert {step.batch["share_without_signal"] for step in world.steps} == {1.0}
    assert notes(world)[0].text.startswith(
        "step 1 trains on 3 groups in which all rewards are the same, 0 on average: 6 such groups"
    )


class Learns(World):
    """Nothing at first; from step 3 on all groups have signal."""

    def later(self, event, *times, **more):
        if isinstance(event, e.EpisodeAdvanced) and event.done:
            late = self.machine.training.step >= 2
            event = replace(event, reward=float(late and event.trajectory.member == 0))
        super().later(event, *times, **more)


def test_the_warning_is_resolved_when_groups_have_signal_again():
    world = Learns(Random(0), recipe=sampled(rule="hold", max_refills=1)).run()
    told = [row.resolved_at is None for row in notes(world)]
    assert told[0]
    assert told.count(False) == 1
    assert not told[-1]


def played(ledger, rewards, *, version=0):
    """One group with these rewards; None is not finished."""
    group = ledger.open(version=version, now=0.0)
    for member, reward in zip(list(group.members), rewards, strict=True):
        member.min_version = version
        if reward is not None:
            ledger.finish(member.id, reward)
    return group


def of_two(rule, most=10):
    return GroupLedger(
        group_size=4, groups_per_step=2, rule=rule, retries=1, filtered=FilteredGroups(most=most)
    )


def test_a_filtered_group_gives_its_place_to_the_next():
    ledger = of_two(hold(0))
    played(ledger, [1.0] * 4)
    assert ledger.may_open
    played(ledger, [1.0, 0.0, 1.0, 1.0])
    assert ledger.may_open
    played(ledger, [0.0, 0.0, 1.0, 0.0])
    assert not ledger.may_open
    assert [group.id for group in ledger.claim(1)] == [1, 2]
    ledger.check()


def test_a_closed_group_without_signal_makes_no_batch_and_what_it_leaves_is_trained():
    ledger = of_two(cut(1))
    played(ledger, [0.0, 0.0, None, None])
    played(ledger, [0.0, 1.0, 0.0, 1.0])
    ledger.trained(1)
    assert ledger.close(2) == []  # it would be a batch of one
    played(ledger, [0.0, 1.0, 0.0, 1.0], version=1)
    assert [str(group.state) for group in ledger.close(2)] == ["filtered"]
    assert [group.id for group in ledger.claim(2)] == [1, 2]
    ledger.trained(2)
    for member in list(ledger.rests[0].members):
        ledger.finish(member.id, float(member.id.member == 2))
    assert str(ledger.rests[0].state) == "ready"
    ledger.check()


def test_a_rest_that_ends_like_its_group_is_filtered_with_it():
    ledger = of_two(cut(1))
    played(ledger, [0.0, 0.0, None, None])
    for _ in range(2):
        played(ledger, [0.0, 1.0, 0.0, 1.0], version=1)
    ledger.close(2)
    for member in list(ledger.rests[0].members):
        ledger.finish(member.id, 0.0)
    assert not ledger.rests
    assert ledger.filtered.groups == 1
    ledger.check()


@pytest.mark.parametrize(
    ("rewards", "signal"), [([1.0, 1.0], False), ([0.5], False), ([0.0, 1e-9], True)]
)
def test_a_group_has_signal_if_two_rewards_differ(rewards, signal):
    assert has_signal(rewards) is signal


def test_where_turns_are_weighed_a_group_of_equal_totals_may_have_signal():
    by_turn, whole = (
        FilteredGroups(algorithm(advantage=name), most=9) for name in ("turn", "grpo")
    )
    early, late = (
        Outcome(1.0, 6, (TurnReward(0, 1, 4, first), TurnReward(0, 5, 8, 1.0 - first)))
        for first in (1.0, 0.0)
    )
    assert not by_turn.filters(ComparedGroup((early, late)))
    assert whole.filters(ComparedGroup((early, late)))
    assert by_turn.filters(ComparedGroup((early, early)))


def test_what_was_filtered_is_counted_by_environment_from_one_step_to_the_next():
    filtered = FilteredGroups(most=9)
    for environment in ("a", "a", "b"):
        filtered.add(10, environment)
    assert filtered.take(trained=30) == {
        "groups_filtered": 3,
        "filtered_tokens": 30,
        "share_filtered": 0.5,
        "env/a/groups_filtered": 2,
        "env/b/groups_filtered": 1,
    }
    assert filtered.take(trained=30) == {
        "groups_filtered": 0,
        "filtered_tokens": 0,
        "share_filtered": 0.0,
    }
