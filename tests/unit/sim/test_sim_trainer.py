"""How long a simulated optimizer step takes that servers slow down for a part of it."""

from __future__ import annotations

import pytest

from libra_cli.config.minibatches import first_minibatch
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import Pool, Seconds, Slot, Trajectory, TrajectoryId, WeightVersion
from libra_cli.sim.trainer import SimTrainer

STEP_S = 100.0


class Run:
    """One step of a trainer that servers at work make twice as slow."""

    def __init__(self, slowdown: float = 2.0) -> None:
        self.now: Seconds = 0.0
        self.due: list[tuple[Seconds, e.Event]] = []
        self.trainer = SimTrainer(
            slots={},
            step_s=lambda samples, gpus: 0.0,
            slowdown=slowdown,
            later=self.later,
            clock=lambda: self.now,
            fixed_s=STEP_S,
        )
        self.trainer.perform(a.Train(1, 1, (), None, WeightVersion(1, 0)))

    def later(self, event: e.Event, after_s: Seconds) -> None:
        self.due.append((self.now + after_s, event))

    def pace(self, at: Seconds, *, servers_work: bool) -> None:
        self.now = at
        self.trainer.pace(servers_work=servers_work)

    def end(self) -> Seconds:
        """When the step ends: at one of the times told, and only there."""
        ends = []
        for at, event in sorted(self.due, key=lambda one: one[0]):
            self.now = at
            assert isinstance(event, e.StepDone)
            if self.trainer.ends(event) is not None:
                ends.append(self.now)
        (end,) = ends
        return end


@pytest.mark.parametrize(
    ("paces", "end"),
    [
        ([], 100.0),
        ([(0.0, True)], 200.0),
        ([(0.0, False)], 100.0),
        ([(50.0, True)], 150.0),
        ([(0.0, True), (100.0, False)], 150.0),
        ([(20.0, True), (60.0, False)], 120.0),
        ([(20.0, True), (30.0, True), (60.0, False)], 120.0),
    ],
)
def test_a_step_passes_at_half_speed_only_while_servers_work(paces, end):
    run = Run()
    for at, servers_work in paces:
        run.pace(at, servers_work=servers_work)
    assert run.end() == pytest.approx(end)


def test_servers_on_cores_of_their_own_slow_no_step():
    run = Run(slowdown=1.0)
    run.pace(50.0, servers_work=True)
    assert run.end() == STEP_S


SHARED_S = 10.0


@pytest.mark.parametrize(
    ("minibatches", "shared", "seconds"),
    # Eight samples of a second each on one GPU; those of the first update are halved by a worker,
    # and a later update takes longer by a pass without gradient.
    [(1, 1.0, 4.0), (2, 0.5 / 1.125, 8 * 1.125 - 2)],
)
def test_a_worker_halves_the_first_update_only(minibatches, shared, seconds):
    due: list[tuple[Seconds, e.Event]] = []
    passes = 0.5 / shared * 2 / minibatches if minibatches > 1 else 1.0
    trainer = SimTrainer(
        slots={name: Slot(name, "n", (0,), Pool.HYBRID) for name in ("base", "worker")},
        step_s=lambda samples, gpus: passes * len(samples) / gpus,
        slowdown=1.0,
        later=lambda event, after_s: due.append((after_s, event)),
        clock=lambda: 0.0,
        base=("base",),
        shared=shared,
        minibatches=minibatches,
        seed=4,
    )
    batch = tuple(
        a.TrainSample(Trajectory(TrajectoryId(number, 0)), 0, False, ()) for number in range(8)
    )
    groups = [one.trajectory.id.group for one in batch]
    first = [batch[i] for i in first_minibatch(groups, parts=minibatches, seed=(4, 1))]
    ids = tuple(one.trajectory.id for one in first[: len(first) // 2])
    share = a.BatchPartition("worker", 1, ids)
    trainer.perform(a.Train(1, 1, batch, None, WeightVersion(1, 0), shares=(share,)))
    ((took, done),) = due
    assert took == pytest.approx(seconds)
    assert isinstance(done, e.StepDone)
    assert done.metrics["own_s"] == pytest.approx(len(first) / 2)
