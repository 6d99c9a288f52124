"""The rules that make a batch: what each waits for, trains, leaves and promises."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.training import TrainingSpec
from libra_cli.core.actions import End
from libra_cli.core.advantages.protocol import ComparedGroup
from libra_cli.core.algorithms.grpo import grpo
from libra_cli.core.records import GroupRecord, LateRecord
from libra_cli.core.rollout.groups import Group, GroupLedger, GroupState
from libra_cli.core.rollout.staleness import (
    StalenessRule,
    cut,
    hold,
    late,
    rule_of,
    soft,
)
from libra_cli.core.run.state import Resume
from libra_cli.core.types import Outcome, TrajectoryId, VersionSpan
from libra_cli.core.workload import READY_SHARE
from tests.world import FEW_RUNS, Faults, World, recipe

RULES: list[Any] = [
    "hold",
    {"rule": "late", "versions": 1},
    "soft",
    {"rule": "cut", "least": 0.5},
    {"rule": "cut", "least": 0.3, "rest": "drop"},
    "token",
]
SIZE = 4
UNSCALED = TrainingSpec(scale_rewards="none")
FAULTS = st.builds(
    Faults,
    server_dies=st.sampled_from([0.0, 0.005]),
    turn_fails=st.sampled_from([0.0, 0.05]),
    environment_breaks=st.sampled_from([0.0, 0.05]),
    trainer_dies=st.sampled_from([0.0, 0.005]),
    stop_asked=st.sampled_from([0.0, 0.0, 0.002]),
)


def world(seed: int, rule: Any, faults: Faults | None = None, **more: Any) -> World:
    """Groups of four, of which one or two are often far behind the others."""
    settled = recipe(rollout={"group_size": SIZE}, training={"staleness": rule, **more})
    return World(Random(seed), faults or Faults(), recipe=settled)


def book(rule: StalenessRule, *, size: int = SIZE, groups: int = 1) -> GroupLedger:
    return GroupLedger(group_size=size, groups_per_step=groups, rule=rule, retries=1)


def end(ledger: GroupLedger, group: Group, *members: int, version: int = 0) -> None:
    """These members have a token of that version and a reward: their number."""
    for number in members:
        place = group.place(TrajectoryId(group.id, number))
        assert place is not None
        group.members[place].add_span(VersionSpan(version, 0, 1))
        ledger.finish(group.members[place].id, float(number))
    ledger.check()


def begin(group: Group, *members: int, version: int = 0) -> None:
    """These members have a token of that version, and go on."""
    for number in members:
        group.members[number].add_span(VersionSpan(version, 0, 1))


def numbers(groups: list[Group]) -> list[tuple[int, list[int]]]:
    return [(group.id, [member.id.member for member in group.members]) for group in groups]


# -- what a recipe says ----------------------------------------------------------------------------


def test_a_name_and_a_mapping_say_the_same():
    for rule in ("hold", "late", "soft", "cut", "token"):
        named = TrainingSpec.model_validate({"staleness": rule})
        spelled = TrainingSpec.model_validate({"staleness": {"rule": rule}})
        assert named == spelled
        again = TrainingSpec.model_validate(named.model_dump(mode="json"))
        assert rule_of(again) == rule_of(named)


def test_unnamed_it_is_cut_and_keeps_a_bound_of_0():
    assert rule_of(TrainingSpec()) == cut(1)
    assert rule_of(TrainingSpec(max_staleness=0)) == hold(0)


def test_half_a_batch_lies_ready_but_for_groups_that_are_closed_when_it_is_taken():
    assert hold(1).ready == soft(4).ready == READY_SHARE == 0.5
    closing = [cut(bound).ready for bound in (1, 2, 4, 1000)]
    assert closing == sorted(closing)
    assert closing[0] == 0.0
    assert closing[-1] == pytest.approx(READY_SHARE, abs=0.001)


def test_arguments_reach_the_rule():
    spec = TrainingSpec.model_validate(
        {"max_staleness": 3, "staleness": {"rule": "late", "versions": 2}}
    )
    assert rule_of(spec) == late(3, 2)
    spec = TrainingSpec.model_validate({"staleness": {"rule": "cut", "least": 0.7, "rest": "drop"}})
    assert rule_of(spec) == cut(1, 0.7, keeps_rest=False)


# -- one group at its last call --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "waits_until"), [(hold(1), 2), (late(1, 1), 3), (late(1, 2), 4), (soft(1), None)]
)
def test_a_step_waits_for_an_open_group_at_its_last_call(rule, waits_until):
    for step in range(1, 8):
        ledger = book(rule)
        straggler, ready = ledger.open(version=0, now=0.0), ledger.open(version=0, now=0.0)
        begin(straggler, 0)
        end(ledger, ready, *range(SIZE), version=step - 1)
        waits = waits_until is not None and step >= waits_until
        assert ledger.claim(step) == ([] if waits else [ready])


def test_a_step_that_waits_goes_on_when_what_it_waits_for_is_played_from_its_prompt_again():
    ledger = book(hold(1))
    straggler, ready = ledger.open(version=0, now=0.0), ledger.open(version=0, now=0.0)
    begin(straggler, 0)
    end(ledger, ready, *range(SIZE), version=1)
    assert ledger.claim(2) == []
    ledger.begin_again(straggler.members[0].id, now=1.0)
    assert ledger.claim(2) == [ready]


def test_no_step_waits_for_a_group_of_which_no_token_is_there():
    for step in range(1, 8):
        ledger = book(hold(1))
        ledger.open(version=0, now=0.0)
        ready = ledger.open(version=0, now=0.0)
        end(ledger, ready, *range(SIZE), version=step - 1)
        assert ledger.claim(step) == [ready]


@pytest.mark.parametrize(
    ("rule", "oldest_trained"), [(hold(1), 1), (late(1, 2), 3), (soft(1), None), (cut(1), None)]
)
def test_a_finished_group_over_what_the_rule_trains_is_played_again(rule, oldest_trained):
    for behind in range(6):
        ledger = book(rule)
        group = ledger.open(version=0, now=0.0)
        end(ledger, group, *range(SIZE))
        again = oldest_trained is not None and behind > oldest_trained
        assert ledger.expire(behind) == ([group] if again else [])
        assert ledger.claim(behind + 1) == ([] if again else [group])


def test_a_batch_is_of_the_oldest_tokens_and_not_of_the_first_numbers():
    """A low number that was played again is younger than what was opened after it."""
    ledger = book(hold(1), groups=2)
    again, second, third = (ledger.open(version=0, now=0.0) for _ in range(3))
    end(ledger, again, *range(SIZE), version=3)
    end(ledger, second, *range(SIZE), version=2)
    end(ledger, third, *range(SIZE), version=2)
    assert ledger.claim(4) == [second, third]


def test_a_group_is_closed_at_its_last_call_and_its_rest_is_trained_when_it_comes():
    ledger = book(cut(1, 0.5))
    group, other = ledger.open(version=0, now=0.0), ledger.open(version=0, now=0.0)
    begin(group, 0)
    end(ledger, group, 1)
    end(ledger, other, *range(SIZE), version=1)
    assert ledger.close(2) == []
    assert ledger.claim(2) == [], "fewer than half are finished"
    end(ledger, group, 3)
    assert ledger.close(2) == [group]
    assert numbers(ledger.claim(2)) == [(0, [1, 3])]
    rest = ledger.rests[0]
    assert [one.reward for one in rest.finished] == [1.0, 3.0]
    ledger.trained(2)
    end(ledger, rest, 0, version=2)
    assert numbers(ledger.claim(3)) == [(1, [0, 1, 2, 3])], "the rest has not ended"
    ledger.trained(3)
    end(ledger, rest, 2, version=3)
    end(ledger, ledger.open(version=3, now=0.0), *range(SIZE), version=3)
    assert numbers(ledger.claim(4)) == [(2, [0, 1, 2, 3]), (0, [0, 2])]
    ledger.trained(4)
    ledger.settle(4)
    ledger.check()
    assert not ledger.groups
    assert not ledger.rests


def test_a_group_is_not_closed_before_that_fills_a_batch():
    ledger = book(cut(1, 0.5), groups=2)
    first, second = ledger.open(version=0, now=0.0), ledger.open(version=0, now=0.0)
    end(ledger, first, 0, 1)
    assert ledger.close(2) == []
    end(ledger, second, *range(SIZE), version=1)
    assert ledger.close(2) == [first]


def test_no_more_groups_are_closed_than_a_batch_has_places_for():
    ledger = book(cut(1, 0.5))
    groups = [ledger.open(version=0, now=0.0) for _ in range(2)]
    for group in groups:
        end(ledger, group, 0, 1, 2)
    assert ledger.close(2) == groups[:1]
    assert numbers(ledger.claim(2)) == [(0, [0, 1, 2])]


def test_what_is_given_up_is_no_longer_played():
    ledger = book(cut(0, 0.5, keeps_rest=False))
    group = ledger.open(version=0, now=0.0)
    end(ledger, group, 0, 2)
    assert ledger.close(1) == [group]
    assert ledger.playing == 0
    assert group.missing == 2
    assert ledger.find(TrajectoryId(0, 1)) is None
    ledger.check()


def test_the_rest_of_a_group_that_is_to_be_trained_again_waits_for_it():
    ledger = book(cut(0, 0.5))
    group = ledger.open(version=0, now=0.0)
    end(ledger, group, 0, 1)
    ledger.close(1)
    ledger.claim(1)
    ledger.trained(1)
    rest = ledger.rests[0]
    end(ledger, rest, 2, 3)
    ledger.rollback(0)
    assert numbers(ledger.claim(1)) == [(0, [0, 1])]
    ledger.trained(1)
    end(ledger, ledger.open(version=1, now=0.0), *range(SIZE), version=1)
    assert numbers(ledger.claim(2)) == [(1, [0, 1, 2, 3]), (0, [2, 3])]


def test_a_checkpoint_knows_which_members_are_still_played():
    ledger = book(cut(0, 0.5))
    group = ledger.open(version=0, now=0.0)
    end(ledger, group, 0, 3)
    ledger.close(1)
    ledger.claim(1)
    ledger.trained(1)
    resumed = book(cut(0, 0.5))
    resumed.restore(ledger.position(1))
    assert resumed.position(1) == ledger.position(1)
    rest = resumed.open(version=1, now=0.0)
    assert numbers([rest]) == [(0, [1, 2])]
    assert [one.reward for one in rest.finished] == [0.0, 3.0]
    assert resumed.open(version=1, now=0.0).id == 1
    before = book(cut(0, 0.5))
    before.restore(ledger.position(0))
    assert numbers([before.open(version=0, now=0.0)]) == [(0, [0, 1, 2, 3])]


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@FEW_RUNS
@given(seed=st.integers(0, 2**32), faults=FAULTS, stream=st.booleans())
def test_any_run_ends_under_any_rule_and_trains_no_trajectory_twice(rule, seed, faults, stream):
    run = world(seed, rule, faults, stream=stream).run()
    assert run.end is not None
    if faults.trainer_dies == 0.0:
        times = Counter((group, member) for group, member, _ in run.members)
        assert not times or max(times.values()) == 1


@pytest.mark.parametrize("rule", RULES, ids=str)
@FEW_RUNS
@given(seed=st.integers(0, 2**32), bound=st.integers(0, 3))
def test_no_member_of_a_trained_group_is_lost(rule, seed, bound):
    run = world(seed, rule, max_staleness=bound).run()
    assert run.end == End("finished", "")
    trained = {(group, member) for group, member, _ in run.members}
    groups = {group for group, _ in run.trained}
    assert len(groups) == 15
    waiting = {
        (rest.id, member.id.member)
        for rest in run.machine.ledger.rests.values()
        if rest.state is not GroupState.TRAINED
        for member in rest.members
    }
    dropped = {(t.group_id, t.member) for t in run.trajectories if t.state == "dropped"} - waiting
    everyone = set(product(groups, range(SIZE)))
    keeps = rule_of(run.recipe.training).keeps_rest
    assert everyone - trained == (waiting if keeps else dropped & everyone)
    if bound == 0 and rule not in RULES[3:5]:
        # A turn may be played on a server that has yet to be synced, and no rule but hold minds.
        most = 0 if rule == "hold" else 1
        assert all(step.staleness_max <= most for step in run.steps)


@FEW_RUNS
@given(seed=st.integers(0, 2**32), bound=st.integers(0, 3), rule=st.sampled_from(RULES))
def test_the_mean_group_is_at_most_the_bound_behind_since_it_was_opened(seed, bound, rule):
    run = world(seed, rule, max_staleness=bound).run()
    rows = {row.group_id: row for row in run.rows(GroupRecord) if row.state == "trained"}
    behind = [row.step - 1 - row.started_version for row in rows.values()]
    assert fmean(behind) <= bound


@pytest.mark.parametrize("rule", RULES, ids=str)
@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_resumed_run_trains_what_was_left_under_any_rule(rule, seed):
    first = world(seed, rule, Faults(stop_asked=0.01)).run()
    if not first.ledgers:
        return
    path, position = list(first.ledgers.items())[-1]
    before = {(g, m) for g, m, step in first.members if step <= position["step"]}
    second = world(seed + 1, rule)
    second = World(second.random, recipe=second.recipe, resume=Resume(path, position))
    second.ledgers[path] = position
    second.run()
    after = {(group, member) for group, member, _ in second.members}
    assert not before & after
    trained = {group for group, _ in [*first.trained, *second.trained]}
    if rule_of(second.recipe.training).least is None:
        assert len(before | after) == 15 * SIZE
    assert all(group in trained for group, _ in before | after)


@FEW_RUNS
@given(seed=st.integers(0, 2**32), rule=st.sampled_from(RULES[3:5]))
def test_a_trainer_that_dies_gives_back_what_closed_groups_left(seed, rule):
    run = world(seed, rule, Faults(trainer_dies=0.01)).run()
    late_ones = {(row.group_id, row.member) for row in run.rows(LateRecord)}
    for group, member in late_ones & {(g, m) for g, m, _ in run.members}:
        steps = [step for g, m, step in run.members if (g, m) == (group, member)]
        assert max(steps) > min(step for g, step in run.trained if g == group)


@FEW_RUNS
@given(seed=st.integers(0, 2**32), rule=st.sampled_from(RULES[3:5]))
def test_gradient_workers_are_given_late_members_like_groups(seed, rule):
    """``World`` checks that no group is in two shares and that shares are of what was sent."""
    nodes = [{"host": "a", "slots": 4, "pool": "hybrid"}, {"host": "c", "pool": "train"}]
    settled = recipe(nodes=nodes, rollout={"group_size": SIZE}, training={"staleness": rule})
    run = World(Random(seed), Faults(replanned=0.05, share_lost=0.1), recipe=settled).run()
    assert run.end is not None


def test_members_that_are_played_late_take_places_of_the_bound():
    ledger = book(cut(0, 0.5))
    group = ledger.open(version=0, now=0.0)
    end(ledger, group, 0, 1)
    ledger.close(1)
    ledger.claim(1)
    ledger.trained(1)
    ledger.published(1)
    end(ledger, ledger.rests[0], 2)
    assert ledger.may_open, "a quarter of a place is taken"
    ledger.open(version=1, now=0.0)
    assert not ledger.may_open


@pytest.mark.parametrize("rule", RULES[3:5], ids=str)
def test_runs_close_groups_and_train_late_members(rule):
    runs = [world(seed, rule).run() for seed in range(5)]
    assert sum("closed" in row.detail for run in runs for row in run.rows(GroupRecord)) > 5
    late_ones = [row for run in runs for row in run.rows(LateRecord) if row.step is not None]
    assert bool(late_ones) is (rule.get("rest") != "drop")


# -- baselines -------------------------------------------------------------------------------------


def _expected_update(long: float, reward: tuple[float, float], size: int, *, whole: bool) -> float:
    """Of the log-odds of a long trajectory: the exact mean over all groups of what is learned."""
    total = 0.0
    for lengths in product((0, 1), repeat=size):
        chance = 1.0
        for is_long in lengths:
            chance *= long if is_long else 1 - long
        rewards = [reward[is_long] for is_long in lengths]
        done = tuple(r for r, is_long in zip(rewards, lengths, strict=True) if not is_long)
        closed = 2 <= len(done) < size
        for is_long, mine in zip(lengths, rewards, strict=True):
            mean = fmean(rewards)
            if closed and not (is_long and whole):
                before = tuple(map(Outcome, done))
                ((advantage,),) = grpo([ComparedGroup((Outcome(0.0),), before)], UNSCALED)[0]
                mean = -advantage
            score = (1 - long) if is_long else -long  # d log p / d log-odds
            total += chance * (mine - mean) * score
    return total / size


@pytest.mark.parametrize("long", [0.2, 0.4])
@pytest.mark.parametrize("reward", [(1.0, 0.0), (0.0, 1.0), (0.2, 0.7)])
def test_late_members_are_compared_with_the_half_that_was_finished(long, reward):
    """With the mean of the whole group, more is off by the more of it is late."""
    true = (reward[1] - reward[0]) * long * (1 - long)
    ours = _expected_update(long, reward, 8, whole=False)
    mixed = _expected_update(long, reward, 8, whole=True)
    assert ours == pytest.approx(true, rel=0.02)
    assert abs(mixed - true) > 5 * abs(ours - true)


def test_nothing_opens_for_a_step_whose_version_is_not_out():
    ledger = book(hold(0))
    group = ledger.open(version=0, now=0.0)
    end(ledger, group, *range(4))
    ledger.claim(1)
    ledger.trained(1)
    assert not ledger.may_open, "it would begin with the version before"
    ledger.published(1)
    assert ledger.may_open
