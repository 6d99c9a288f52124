"""How long a simulated optimizer step takes that servers slow down for a part of it."""

from __future__ import annotations

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import Seconds, WeightVersion
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
