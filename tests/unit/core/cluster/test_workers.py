"""A gradient worker comes, takes shares, misses versions and leaves."""

from __future__ import annotations

from array import array

import pytest

from libra_cli.core.actions import StopWorker, SyncWorker, TrainSample
from libra_cli.core.cluster.gradient_workers import MAX_UNREACHED, GradientWorkers
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.events import PublishedVersion, WorkerStarted, WorkerSynced, WorkerSyncFailed
from libra_cli.core.notices import Result, StepOver
from libra_cli.core.types import Pool, Slot, Trajectory, TrajectoryId, WeightVersion

SLOT = Slot("b/0", "b", (), Pool.HYBRID)


def version(number: int) -> PublishedVersion:
    """As the trainer published it."""
    return PublishedVersion(WeightVersion(1, number), 1000, 0.0)


def samples(count: int) -> list[TrainSample]:
    """As many trajectories of eight tokens."""
    return [
        TrainSample(
            Trajectory(TrajectoryId(number, 0), token_ids=array("i", [0] * 8)),
            0,
            False,
            (),
        )
        for number in range(count)
    ]


def kinds(actions: list[Result]) -> list[type]:
    """What is to be done, without the records."""
    return [type(action) for action in actions if isinstance(action, StopWorker | SyncWorker)]


@pytest.fixture
def workers() -> GradientWorkers:
    """One worker, which has proved version 1."""
    made = GradientWorkers(1)
    made.publish(version(1))
    made.start(made.at(SLOT, now=0.0), now=0.0)
    made.started(WorkerStarted("b/0", 0), now=1.0)
    made.synced(WorkerSynced("b/0", 0, version(1), 0.0, 0.0, 0.0, 2.0), now=2.0)
    return made


@pytest.fixture
def status(workers: GradientWorkers) -> Replica:
    """Its own."""
    return workers.replicas["b/0"]


def test_a_worker_that_leaves_ends_the_share_it_has(workers, status):
    assert workers.shares(samples(4), 1, 1)
    for _ in range(2):  # whoever wants it gone says so again whenever something happens
        assert kinds(workers.leave(status, "not wanted", now=3.0)) == []
        assert status.state is ReplicaState.DRAINING
    assert kinds(workers.step_over(StepOver(), now=4.0)) == [StopWorker]


def test_a_worker_without_a_share_leaves_at_once(workers, status):
    assert kinds(workers.leave(status, "not wanted", now=3.0)) == [StopWorker]


def test_a_version_that_does_not_arrive_costs_shares_and_not_the_worker(workers, status):
    workers.publish(version(2))
    failed = WorkerSyncFailed("b/0", 0, version(2), "no answer")
    assert kinds(workers.sync_failed(failed, now=3.0)) == [], "the same again would fail again"
    assert workers.shares(samples(4), 1, 1) == ()
    assert kinds(workers.publish(version(3))) == [SyncWorker]
    workers.publish(version(4))
    failed = WorkerSyncFailed("b/0", 0, version(3), "no answer")
    assert kinds(workers.sync_failed(failed, now=4.0)) == [SyncWorker], "a newer one is there"
    workers.synced(WorkerSynced("b/0", 0, version(4), 0.0, 0.0, 0.0, 5.0), now=5.0)
    assert workers.shares(samples(4), 1, 1)
    assert status.failures == 0


def test_a_worker_that_no_version_reaches_is_taken_out(workers, status):
    actions: list[Result] = []
    for number in range(2, 2 + MAX_UNREACHED):
        assert status.state is ReplicaState.TRAINING
        workers.publish(version(number))
        actions = workers.sync_failed(
            WorkerSyncFailed("b/0", 0, version(number), "the disk is full"), now=float(number)
        )
    assert kinds(actions) == [StopWorker]
    assert status.detail == "the disk is full"
