"""The replay buffer: what it holds, what it draws, and that the ledger still trains once."""

from __future__ import annotations

import pickle
from array import array
from collections import Counter
from dataclasses import replace
from json import loads

import pytest

from libra_cli.config.training import ReplaySpec
from libra_cli.core import events as e
from libra_cli.core.actions import Save, Train
from libra_cli.core.algorithms.replay import ReplayBuffer, replay_metrics
from libra_cli.core.cluster.step_batch import StepBatch
from libra_cli.core.cluster.trainer import TrainerGroup
from libra_cli.core.notices import Result, StepClaimed
from libra_cli.core.records import NoteRecord, StepRecord
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.rollout.once import check_once
from libra_cli.core.rollout.staleness import hold, soft
from libra_cli.core.types import Pool, Slot, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from tests.world import algorithm

BATCH = 4


def group_of(number: int, rewards: tuple[float, ...] = (0.0, 1.0), *, version: int = 0) -> Group:
    members = []
    for member, reward in enumerate(rewards):
        one = Trajectory(TrajectoryId(number, member), reward=reward)
        one.token_ids = array("i", [1, 2, 3])
        one.add_span(VersionSpan(version, 1, 3))
        members.append(one)
    return Group(number, members, 0.0, version, hold(1), oldest=version)


def buffer_of(**spec: object) -> ReplayBuffer:
    return ReplayBuffer(ReplaySpec.model_validate({"groups": 2, **spec}), seed=0)


def drawn_often(buffer: ReplayBuffer, *, draws: int = 600, held: int = 9) -> Counter[int]:
    return Counter(group.id for step in range(draws) for group in buffer.draw(step, held, []))


def test_the_longest_held_make_room():
    buffer = buffer_of(capacity=3)
    for step in range(5):
        buffer.add([group_of(step)], step)
    assert set(drawn_often(buffer)) == {2, 3, 4}


def test_a_group_that_is_trained_again_is_held_from_then_on():
    buffer = buffer_of(capacity=2)
    for step, number in enumerate([0, 1, 0, 2]):
        buffer.add([group_of(number)], step)
    assert set(drawn_often(buffer)) == {0, 2}


def test_a_draw_is_the_same_for_the_same_seed_and_step_and_another_for_another_step():
    buffer = buffer_of(capacity=20)
    buffer.add([group_of(number) for number in range(20)], 1)
    again = pickle.loads(pickle.dumps(buffer))
    draws = [[one.id for one in buffer.draw(step, 1, [])] for step in range(20)]
    assert draws == [[one.id for one in again.draw(step, 1, [])] for step in range(20)]
    assert len({tuple(draw) for draw in draws}) > 10


@pytest.mark.parametrize(("sampling", "most"), [("recent", 3), ("reward", 1), ("advantage", 0)])
def test_the_rth_is_drawn_with_a_probability_proportional_to_1_over_r(sampling, most):
    buffer = buffer_of(groups=1, capacity=4, sampling=sampling)
    rewards = [(0.0, 1.0), (0.9, 1.0), (0.4, 0.5), (0.1, 0.3)]
    for number, two in enumerate(rewards):
        buffer.add([group_of(number, two)], number)
    often = drawn_often(buffer, draws=2000)
    assert often[most] / 2000 == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.04)


def test_by_advantage_a_group_without_any_is_not_drawn():
    buffer = buffer_of(sampling="advantage")
    buffer.add([group_of(0, (1.0, 1.0)), group_of(1)], 1)
    assert set(drawn_often(buffer)) == {1}


def test_what_is_too_old_or_in_the_batch_is_not_drawn():
    buffer = buffer_of(most_staleness=8)
    fresh = group_of(2, version=3)
    buffer.add([group_of(0, version=0), group_of(1, version=1), fresh], 3)
    assert [one.id for one in buffer.draw(10, 9, [fresh])] == [1]


def test_the_metrics_count_generated_tokens_and_how_old_they_are():
    found = replay_metrics([group_of(0, version=0), group_of(1, version=2)], 4)
    assert found == {
        "replayed_groups": 2,
        "replayed_tokens": 8,
        "replayed_staleness_mean": 3.0,
    }
    assert replay_metrics([], 4)["replayed_staleness_mean"] is None


class Steps:
    """A trainer group whose batches are always ready."""

    def __init__(self, buffer: ReplayBuffer | None, *, step: int = 0) -> None:
        self.ledger = GroupLedger(group_size=2, groups_per_step=BATCH, rule=soft(1), retries=1)
        self.training = TrainerGroup(
            self.ledger,
            [Slot("a/0", "a", (), Pool.TRAIN)],
            StepBatch(self.ledger, algorithm(scale_rewards="none"), replay=buffer),
            checkpoint_every=100,
        )
        self.rows: list[StepRecord] = []
        self.notes: list[NoteRecord] = []
        self.training.start(now=0.0)
        self.start(step)

    def start(self, step: int) -> None:
        incarnation = self.training.incarnation
        version = e.PublishedVersion(WeightVersion(incarnation, step), 1, 0.0)
        self.save(self.training.started(e.TrainerStarted(incarnation, version), now=0.0))

    def claim(self) -> Train:
        step = self.training.step
        while not self.ledger.batch_is_full:
            group = self.ledger.open(version=step, now=0.0)
            for member in group.members:
                member.token_ids = array("i", [1, 2])
                member.add_span(VersionSpan(step, 1, 2))
                self.ledger.finish(member.id, float(member.id.member))
        (train,) = [
            one.train
            for one in self.training.claim(now=0.0, target=99)
            if isinstance(one, StepClaimed)
        ]
        return train

    def take(self) -> Train:
        train = self.claim()
        self.save(self.training.done(e.StepDone(train.incarnation, train.step), now=0.0))
        self.ledger.check()
        return train

    def save(self, results: list[Result]) -> None:
        records = [one.record for one in results if isinstance(one, Save)]
        self.rows += [one for one in records if isinstance(one, StepRecord)]
        self.notes += [one for one in records if isinstance(one, NoteRecord)]


def groups_in(train: Train) -> Counter[int]:
    return Counter(sample.trajectory.id.group for sample in train.samples)


def test_a_step_trains_its_own_groups_and_some_again_and_says_which():
    steps = Steps(buffer_of())
    first, second = steps.take(), steps.take()
    assert set(groups_in(first)) == {0, 1, 2, 3}
    again = loads(steps.rows[1].replayed_json)
    assert len(again) == 2
    assert set(again) < {0, 1, 2, 3}
    assert groups_in(second) == dict.fromkeys([4, 5, 6, 7, *again], 2)
    assert loads(steps.rows[1].groups_json) == [4, 5, 6, 7]
    for sample in second.samples:
        assert sample.advantages == ((0, sample.trajectory.id.member - 0.5),)
    assert steps.rows[1].generated_tokens == steps.rows[0].generated_tokens
    assert steps.rows[1].batch["replayed_groups"] == 2


def test_replayed_tokens_keep_the_versions_that_they_were_generated_with():
    steps = Steps(buffer_of(groups=4))
    for _ in range(11):
        steps.take()
    last = steps.take()
    ages = {sample.staleness for sample in last.samples}
    assert max(ages) > 1
    assert all(not sample.fresh for sample in last.samples if sample.staleness)


def test_a_replayed_group_is_no_group_trained_twice():
    steps = Steps(buffer_of())
    for _ in range(3):
        steps.take()
    assert check_once(steps.rows) == []
    wrong = replace(steps.rows[0], replayed_json="[7]")
    assert check_once([wrong]) == ["group 7 is replayed in step 1, and not trained before"]


def test_what_a_dead_trainer_has_lost_is_trained_before_it_is_replayed():
    steps = Steps(buffer_of(groups=8))
    for _ in range(3):
        steps.take()
    steps.training.failed("killed", now=0.0)
    steps.training.gone(now=0.0)
    steps.training.restart(now=100.0)
    steps.start(1)
    assert set(groups_in(steps.claim())) == set(range(8)), "those of step 3 are yet to be trained"


def test_groups_that_were_replayed_when_the_trainer_died_are_not_replayed_again():
    steps = Steps(buffer_of(groups=4))
    steps.take()
    steps.claim()
    steps.training.failed("killed", now=0.0)
    steps.training.gone(now=0.0)
    steps.training.restart(now=100.0)
    steps.start(1)
    assert set(groups_in(steps.claim())) == {4, 5, 6, 7}


def test_a_run_that_goes_on_without_its_buffer_says_so():
    assert Steps(buffer_of()).notes == []
    (note,) = Steps(buffer_of(), step=7).notes
    assert "goes on from step 7" in note.text


def test_without_a_buffer_nothing_is_replayed():
    steps = Steps(None)
    steps.take()
    assert set(groups_in(steps.take())) == {4, 5, 6, 7}
    assert "replayed_groups" not in steps.rows[1].batch
