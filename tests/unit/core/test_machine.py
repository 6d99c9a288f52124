"""The machine, driven through thousands of random worlds."""

from __future__ import annotations

import heapq
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core import events as e
from libra_cli.core.actions import End
from libra_cli.core.records import GroupRecord, SlotRecord, SyncRecord
from libra_cli.core.rollout import groups
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.staleness import hold
from libra_cli.core.run.state import Phase, Resume
from tests.world import FEW_RUNS, Faults, World, recipe

CHANCES = st.sampled_from([0.0, 0.0, 0.02, 0.1])
FAULTS = st.builds(
    Faults,
    server_dies=st.sampled_from([0.0, 0.0, 0.005]),
    sync_fails=CHANCES,
    turn_fails=CHANCES,
    refused=CHANCES,
    environment_breaks=CHANCES,
    trainer_dies=st.sampled_from([0.0, 0.0, 0.005]),
    node_lost=st.sampled_from([0.0, 0.01]),
    node_gone=st.sampled_from([0.0, 0.5]),
    checkpoint_fails=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    stop_asked=st.sampled_from([0.0, 0.0, 0.0, 0.002]),
    repeated=st.sampled_from([0.0, 0.1]),
    replanned=st.sampled_from([0.0, 0.03]),
    written_later=st.sampled_from([0.0, 0.5, 1.0]),
    forked=st.sampled_from([0.0, 0.0, 0.5]),
)

# The claims about one kind of fault; a run under all kinds at once has the full number.


@FEW_RUNS
@given(seed=st.integers(0, 2**32), faults=FAULTS)
def test_any_run_ends_and_never_breaks_an_invariant(seed, faults):
    world = World(Random(seed), faults).run()
    assert world.end is not None
    assert world.end.state in ("finished", "stopped", "failed")


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_run_without_faults_finishes_and_trains_every_group_once(seed):
    world = World(Random(seed)).run()
    assert world.end == End("finished", "")
    assert sorted({step.step for step in world.steps}) == [1, 2, 3, 4, 5]
    groups = [group for group, _ in world.trained]
    assert len(groups) == len(set(groups)) == 15


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_servers_that_die_cost_time_but_no_group(seed):
    world = World(Random(seed), Faults(server_dies=0.01)).run()
    if world.end == End("finished", ""):
        groups = [group for group, _ in world.trained]
        assert len(groups) == len(set(groups)) == 15


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_trainer_that_dies_trains_again_only_what_its_checkpoint_missed(seed):
    world = World(Random(seed), Faults(trainer_dies=0.003)).run()
    if world.end != End("finished", ""):
        return
    # Per timeline: a step trained again replaces what it had been, and all that came after it.
    kept: dict[int, set[int]] = {}
    for step in dict.fromkeys(step for _, step in world.trained):
        batches = [group for group, other in world.trained if other == step]
        kept[step] = set(batches[-3:])
    final = [group for groups in kept.values() for group in groups]
    assert len(final) == len(set(final)) == 15


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_failure_is_never_scored(seed):
    world = World(Random(seed), Faults(environment_breaks=0.2, turn_fails=0.2, refused=0.5)).run()
    for row in world.trajectories:
        if row.state in ("failed", "dropped"):
            assert row.reward is None


def test_a_group_whose_member_fails_too_often_is_dropped_as_a_whole():
    world = World(Random(3), Faults(environment_breaks=0.6)).run(most_events=200_000)
    dropped = {row.group_id for row in world.rows(GroupRecord) if row.state == "dropped"}
    assert dropped
    assert not dropped & {group for group, _ in world.trained}


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_resumed_run_trains_exactly_the_prompts_that_were_left(seed):
    first = World(Random(seed), Faults(stop_asked=0.01)).run()
    if not first.ledgers:
        return
    path, position = list(first.ledgers.items())[-1]
    before = {group for group, step in first.trained if step <= position["step"]}
    second = World(Random(seed + 1), resume=Resume(path, position))
    second.ledgers[path] = position
    second.run()
    after = {group for group, _ in second.trained}
    assert not before & after
    left = [group for group in range(max(before | after, default=0) + 1) if group not in before]
    assert after <= set(left)
    assert len(before | after) == 15


def killed(seed: int, events: int, rule: str) -> World:
    """A run whose controller dies at some moment, wherever everything is then."""
    world = World(Random(seed), recipe=recipe(training={"staleness": rule}))
    world.later(e.RunStarted())
    while world.end is None and world.events < events:
        world.now, _, event = heapq.heappop(world._heap)
        world.give(event)
    return world


@FEW_RUNS
@given(
    seed=st.integers(0, 2**32),
    events=st.integers(50, 700),
    rule=st.sampled_from(["hold", "late", "soft", "cut", "token"]),
    heard=st.booleans(),
)
def test_after_a_kill_no_prompt_is_skipped_or_trained_twice_however_long_it_is_played(
    seed, events, rule, heard
):
    first = killed(seed, events, rule)
    if not first.ledgers:
        return
    # The newest on the disk counts, whether or not anybody had heard of it.
    path, position = list(first.ledgers.items())[0 if heard else -1]
    before = [(group, member) for group, member, step in first.members if step <= position["step"]]
    second = World(
        Random(seed + 1),
        recipe=first.recipe,
        resume=Resume(path, position),
        ledgers={path: position},
    ).run()
    trained = before + [(group, member) for group, member, _ in second.members]
    assert len(trained) == len(set(trained)), "twice"
    left = second.machine.ledger.position(second.machine.training.step)
    going_on = {rest["group"]: rest["members"] for rest in left["rests"]}
    waiting = {
        (group, member) for group in left["queue"] for member in going_on.get(group, range(2))
    }
    dropped = {row.group_id for row in second.rows(GroupRecord) if row.state == "dropped"}
    everything = {(group, member) for group in range(left["next_group"]) for member in range(2)}
    assert set(trained) | waiting | {one for one in everything if one[0] in dropped} == everything
    assert not set(trained) & waiting
    # Those that were being played, the long ones among them, come before any new prompt.
    opened = [row.group_id for row in second.rows(GroupRecord) if row.state == "open"]
    again = [group for group in dict.fromkeys(opened) if group in position["queue"]]
    assert again == position["queue"][: len(again)]
    assert list(dict.fromkeys(opened))[: len(again)] == again


def test_tokens_of_a_version_that_does_not_verify_are_thrown_away():
    world = World(Random(5), Faults(sync_fails=0.3)).run()
    syncs = world.rows(SyncRecord)
    proved = {sync.version for sync in syncs if sync.verified}
    for row in world.trajectories:
        if row.max_version is not None:
            assert row.max_version in proved


def test_a_server_that_never_served_is_not_started_again():
    world = World(Random(1), Faults(start_fails=1.0)).run()
    assert world.end is not None
    assert world.end.state == "failed"
    assert "no memory" in world.end.error
    starts = [row.slot for row in world.rows(SlotRecord) if row.state == "starting"]
    assert len(starts) == len(set(starts))


def test_the_second_interrupt_skips_the_checkpoint():
    world = World(Random(2))
    world.later(e.RunStarted())
    while world.machine.phase is not Phase.RUNNING:
        world.now, _, event = world._heap.pop(0)
        world.give(event)
    world.give(e.StopRequested(True, "twice"))
    assert str(world.machine.phase) == "stopping"


@pytest.mark.parametrize("policy", ["least-loaded", "sticky-least-loaded"])
def test_every_policy_drives_a_run_to_its_end(policy):
    world = World(Random(4), recipe=recipe(scheduler={"policy": policy})).run()
    assert world.end == End("finished", "")


class Slow(World):
    """A trainer whose checkpoints take minutes."""

    def _do_train(self, action):
        super()._do_train(action)
        late = [entry for entry in self._heap if isinstance(entry[2], e.CheckpointSaved)]
        for entry in late:
            self._heap.remove(entry)
            self.later(entry[2], 200.0, 300.0)


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_checkpoint_that_takes_minutes_is_waited_for(seed):
    world = Slow(Random(seed)).run()
    assert world.end == End("finished", "")
    assert {step.checkpoint for step in world.steps if step.step == 5} == {"", "/checkpoint/1-5"}


def test_an_environment_that_always_breaks_ends_the_run():
    world = World(Random(1), Faults(environment_breaks=1.0)).run()
    assert world.end is not None
    assert world.end.state == "failed"
    assert "reset broke" in world.end.error


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_only_proved_versions_are_trained_on_even_when_proofs_break_off(seed):
    world = World(Random(seed), Faults(sync_fails=0.4)).run()
    proved = {sync.version for sync in world.rows(SyncRecord) if sync.verified}
    finished = [row for row in world.trajectories if row.state == "finished"]
    assert {row.max_version for row in finished} <= proved


def test_playing_again_because_of_age_or_of_a_controller_that_died_is_not_a_failure():
    ledger = GroupLedger(group_size=1, groups_per_step=1, rule=hold(0), retries=1)
    for version in range(5):
        group = ledger.open(version=version, now=0.0)
        ledger.finish(group.members[0].id, 1.0)
        assert ledger.expire(version + 1) == [group]
    group = ledger.open(version=5, now=0.0)
    assert ledger.begin_again(group.members[0].id, now=0.0) is not None
    assert ledger.begin_again(group.members[0].id, now=0.0, counts=False) is not None
    assert ledger.begin_again(group.members[0].id, now=0.0) is None
    ledger.check()


def test_a_checkpoint_names_what_the_newest_steps_trained_and_does_not_grow(monkeypatch):
    monkeypatch.setattr(groups, "TRAINED_STEPS", 3)
    ledger = GroupLedger(group_size=1, groups_per_step=1, rule=hold(0), retries=1)
    for step in range(1, 9):
        group = ledger.open(version=step - 1, now=0.0)
        ledger.finish(group.members[0].id, 1.0)
        assert ledger.claim(step)
        ledger.trained(step)
    assert [step for step, _ in ledger.position(8)["trained"]] == [6, 7, 8]
