"""Who computes what of a step, and when a worker may."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.minibatches import first_minibatch
from libra_cli.config.training import TrainingSpec
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.gradient_workers import MAX_MISSED, GradientWorkers
from libra_cli.core.cluster.partition import MARGIN, Speeds, deal_shares
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.notices import ReplicaChanged, StepOver
from libra_cli.core.types import Pool, Slot, Trajectory, TrajectoryId, WeightVersion


def sample(number: int, tokens: int) -> a.TrainSample:
    played = Trajectory(TrajectoryId(number // 8, number % 8), token_ids=array("i", [0] * tokens))
    return a.TrainSample(played, 0, False, ())


def slot(index: int, gpus: int = 1) -> Slot:
    return Slot(f"w/{index}", "w", tuple(range(index, index + gpus)), Pool.HYBRID)


def version(step: int, incarnation: int = 1) -> e.PublishedVersion:
    return e.PublishedVersion(WeightVersion(incarnation, step), 1, 0.0)


@given(
    sizes=st.lists(st.integers(1, 1000), max_size=30),
    speeds=st.lists(st.floats(0.1, 100.0), max_size=4),
)
def test_trajectories_are_dealt_at_most_once(sizes, speeds):
    known = Speeds(1)
    known.trainer(100.0, 1.0)
    workers = [Replica(slot(index), since=0.0) for index in range(len(speeds))]
    for status, speed in zip(workers, speeds, strict=True):
        known.worker(status.slot.id, 1000, 1000 / speed)
    batch = [sample(number, size) for number, size in enumerate(sizes)]
    shares = deal_shares(batch, workers, known)
    dealt = [one for share in shares for one in share.trajectories]
    assert len(dealt) == len(set(dealt))
    assert set(dealt) <= {one.trajectory.id for one in batch}
    assert all(share.trajectories for share in shares)


@given(fast=st.integers(1, 8), slow=st.integers(1, 8))
def test_shares_are_in_proportion_to_speed(fast, slow):
    known = Speeds(1)
    known.trainer(100.0, 1.0)
    workers = [Replica(slot(index), since=0.0) for index in range(2)]
    for status, factor in zip(workers, (fast, slow), strict=True):
        known.worker(status.slot.id, int(100 * factor), MARGIN)  # what is dealt as 100 * factor
    batch = [sample(number, 10) for number in range(400)]
    shares = {share.slot: len(share.trajectories) for share in deal_shares(batch, workers, known)}
    whole = 1 + fast + slow
    assert shares["w/0"] == pytest.approx(400 * fast / whole, abs=2)
    assert shares["w/1"] == pytest.approx(400 * slow / whole, abs=2)


@given(sizes=st.lists(st.integers(1, 1000), max_size=30), workers=st.integers(1, 3))
def test_a_loss_that_compares_trajectories_has_whole_groups_in_a_share(sizes, workers):
    ready = [Replica(slot(index), since=0.0) for index in range(workers)]
    batch = [sample(number, size) for number, size in enumerate(sizes)]
    for number, one in enumerate(batch):
        one.trajectory.id = TrajectoryId(number % 7, number // 7)
    shares = deal_shares(batch, ready, Speeds(1), whole_groups=True)
    groups = [{one.group for one in share.trajectories} for share in shares]
    assert sum(map(len, groups)) == len(set().union(*groups))
    for share, of_share in zip(shares, groups, strict=True):
        everyone = {one.trajectory.id for one in batch if one.trajectory.id.group in of_share}
        assert set(share.trajectories) == everyone


def test_a_loss_of_a_user_may_compare_trajectories():
    assert TrainingSpec(loss="tba").needs.whole_groups
    assert TrainingSpec(loss="my_package.losses:mine").needs.whole_groups
    assert not TrainingSpec(loss="dapo").needs.whole_groups


def test_unknown_speeds_count_gpus_and_the_core_goes_first():
    known = Speeds(2)
    worker = Replica(slot(0, gpus=2), since=0.0)
    assert deal_shares([sample(0, 10)], [worker], known) == ()
    (share,) = deal_shares([sample(0, 10), sample(1, 10)], [worker], known)
    assert share.trajectories == (TrajectoryId(0, 1),)


def test_a_worker_whose_gradients_take_longer_than_the_step_has_no_share():
    known = Speeds(1)
    known.trainer(100.0, 1.0)
    workers = [Replica(slot(index), since=0.0) for index in range(2)]
    batch = [sample(number, 10) for number in range(40)]  # 4 seconds of the trainer's
    known.would_fetch("w/0", 1.0)
    known.would_fetch("w/1", 9.0)
    (share,) = deal_shares(batch, workers, known)
    assert share.slot == "w/0"
    # Both end at t: 100 t + 90 (t - 1) tokens are 400.
    assert len(share.trajectories) == pytest.approx(40 - 490 / 19, abs=1)
    known.fetched("w/1", 0.5)  # it is better than was guessed
    assert {one.slot for one in deal_shares(batch, workers, known)} == {"w/0", "w/1"}


def test_a_worker_that_would_not_be_done_in_time_is_told_why():
    workers = GradientWorkers(1, gradient_ratio=2.0)
    status = ready(workers, slot(0), version(1))  # which took 0.1 s
    assert workers.shares(BATCH, 1, 1)
    workers.step_over(StepOver((), 1000.0, 1.0), now=2.0)
    assert workers.shares(BATCH, 1, 1) == ()  # 80 tokens are 0.08 s
    results = workers.step_over(StepOver((), 1000.0, 1.0), now=3.0)
    assert results == [ReplicaChanged(status)]
    assert status.detail == (
        "no share: its gradients take 0.2 s to fetch, and the trainer computes all of the step "
        "in 0.1 s"
    )
    assert workers.step_over(StepOver((), 1000.0, 1.0), now=4.0) == []


def ready(workers: GradientWorkers, at: Slot, published: e.PublishedVersion) -> Replica:
    """A worker that has proved a version."""
    status = workers.at(at, now=0.0)
    workers.publish(published)
    workers.start(status, now=0.0)
    workers.started(e.WorkerStarted(at.id, status.incarnation), now=0.0)
    prove(workers, status, published)
    return status


def prove(workers: GradientWorkers, status: Replica, published: e.PublishedVersion) -> None:
    workers.synced(
        e.WorkerSynced(status.slot.id, status.incarnation, published, 0.0, 0.1, 0.1, 1.0), now=1.0
    )


BATCH = [sample(number, 10) for number in range(8)]


def test_a_worker_has_a_share_of_the_step_whose_version_it_is_just_loading():
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    assert workers.shares(BATCH, 1, 1)
    workers.publish(version(2))
    assert workers.shares(BATCH, 1, 1)  # it takes it once it has proved the version
    prove(workers, status, version(2))
    assert workers.shares(BATCH, 1, 1)


def test_of_several_updates_the_first_is_shared_and_no_other():
    workers = GradientWorkers(1, minibatches=2, seed=7)
    ready(workers, slot(0), version(1))
    batch = [sample(number, 10) for number in range(32)]
    first = set(first_minibatch(range(4), parts=2, seed=(7, 3)))
    (share,) = workers.shares(batch, 1, 3)
    assert len(first) == 2
    assert {one.group for one in share.trajectories} == first
    assert workers.would_share


def test_a_batch_that_a_critic_weighs_has_no_shares_and_that_is_told():
    workers = GradientWorkers(1, shares_steps=False)
    status = ready(workers, slot(0), version(1))
    assert workers.shares(BATCH, 1, 1) == ()
    assert not workers.would_share
    workers.step_over(StepOver(()), now=3.0)
    assert "cannot be shared" in status.detail


def test_a_worker_that_lies_further_back_has_no_share():
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    workers.publish(version(2))
    workers.publish(version(3))
    assert workers.shares(BATCH, 1, 1) == ()
    prove(workers, status, version(2))
    assert workers.shares(BATCH, 1, 1)


def test_a_worker_that_proves_an_old_version_goes_on_to_the_newest_first():
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    workers.publish(version(2))
    workers.publish(version(3))
    actions = workers.synced(
        e.WorkerSynced(status.slot.id, status.incarnation, version(2), 0.0, 0.1, 0.1, 1.0), now=1.0
    )
    assert a.SyncWorker("w/0", status.incarnation, version(3)) in actions


def test_the_same_step_of_another_trainer_is_another_version():
    workers = GradientWorkers(1)
    ready(workers, slot(0), version(1, incarnation=1))
    workers.publish(version(1, incarnation=2))
    workers.publish(version(1, incarnation=3))
    assert workers.shares(BATCH, 1, 1) == ()


@pytest.mark.parametrize("what", ["unreachable", "leaving", "starting"])
def test_only_a_worker_that_works_and_can_be_reached_has_a_share(what):
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    if what == "unreachable":
        workers.lost("w")
    else:
        workers.leave(status, "the plan", now=2.0)
        if what == "starting":
            workers.after_end(status, again=True, now=2.0)
    assert workers.shares(BATCH, 1, 1) == ()


def done(status: Replica, *, used: bool) -> e.ShareDone:
    return e.ShareDone(
        status.slot.id, status.incarnation, used, "" if used else "late", 10, 1.0, 0.0, 1, 0.1
    )


def test_shares_that_go_unused_in_a_row_take_the_worker_out():
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    story = [False] * (MAX_MISSED - 1) + [True] + [False] * MAX_MISSED
    for used in story:
        assert status.state is ReplicaState.TRAINING
        workers.shares(BATCH, 1, 1)
        workers.step_over(StepOver((done(status, used=used),)), now=2.0)
    assert status.state is ReplicaState.STOPPING
    assert status.detail == f"{MAX_MISSED} shares in a row were of no use: late"


@pytest.mark.parametrize(("transfer_s", "shares"), [(0.001, True), (1000.0, False)])
def test_a_worker_has_a_share_as_long_as_its_gradients_have_come_fast_enough(transfer_s, shares):
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    assert workers.shares(BATCH, 1, 1)
    came = replace(done(status, used=True), transfer_s=transfer_s)
    workers.step_over(StepOver((came,), 80.0, 8.0), now=2.0)
    assert bool(workers.shares(BATCH, 1, 1)) is shares


def test_what_a_worker_of_before_says_changes_nothing():
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    old = done(status, used=True)
    workers.take_out(status, "died", now=2.0)
    workers.after_end(status, again=True, now=2.0)
    workers.step_over(StepOver((old,)), now=3.0)
    assert not workers.used


def test_a_leaving_worker_goes_when_the_step_with_its_share_is_over():
    workers = GradientWorkers(1)
    status = ready(workers, slot(0), version(1))
    workers.shares(BATCH, 1, 1)
    assert not any(isinstance(x, a.StopWorker) for x in workers.leave(status, "the plan", now=2.0))
    actions = workers.step_over(StepOver((done(status, used=True),), 10.0, 1.0), now=3.0)
    assert a.StopWorker("w/0", status.incarnation) in actions
    workers.check()


def test_a_worker_that_never_worked_is_not_started_again():
    workers = GradientWorkers(1)
    status = workers.at(slot(0), now=0.0)
    workers.start(status, now=0.0)
    workers.failed(e.WorkerFailed("w/0", status.incarnation, "no memory"), now=1.0)
    workers.after_end(status, again=True, now=2.0)
    assert status.state is ReplicaState.FAILED
    workers.expect(slot(0), now=3.0)
    assert str(status.state) == "idle", "a new plan hopes for it"
