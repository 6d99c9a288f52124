"""Frozen models in virtual time: what their servers take, and whom the planner gives a slot."""

from __future__ import annotations

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.sim.models import SimModels
from libra_cli.sim.virtual_time import VirtualTime
from tests.research.judge_slots import decided_run, recipe, static_plan, static_run, step_s

JUDGE = FrozenModelSpec(name="judge", path="/judge")


def models(asks: float) -> tuple[VirtualTime, SimModels]:
    time = VirtualTime()
    return time, SimModels(time, [JUDGE], {"judge": asks}, start_s=5.0)


def test_one_server_answers_one_after_the_other_and_two_share() -> None:
    time, made = models(2.0)
    assert [made.wait_s(0.0) for _ in range(3)] == [2.0, 4.0, 6.0]
    made.perform(a.StartModel("a/0", 0, "judge"))
    assert made.wait_s(0.0) == 7.0  # it serves from 5 on
    assert isinstance(time.next(), e.ModelsUsed)
    time.now = 4.0
    (use,) = made.uses
    assert (use.servers, use.busy_s, use.asked_s) == (1, 4.0, 2.0 + 4.0 + 4.0 + 4.0)
    time.now = 20.0
    (use,) = made.uses
    assert (use.servers, use.busy_s, use.asked_s) == (2, 8.0, 2.0 + 4.0 + 6.0 + 7.0)
    made.perform(a.StopModel("a/0", 1))
    assert made.uses[0].servers == 1


def test_what_is_asked_later_is_not_counted_before() -> None:
    time, made = models(2.0)
    made.wait_s(10.0)
    assert made.uses[0].busy_s == 0.0
    time.now = 11.0
    assert (made.uses[0].busy_s, made.uses[0].asked_s) == (1.0, 1.0)


def test_a_judge_that_holds_up_the_run_gets_slots_until_it_does_not() -> None:
    made, asks = recipe(steps=10, bound=1, groups=4), 10.0
    tape = decided_run(made, asks, 0)
    last = max(tape.plans.values(), key=lambda row: row.plan)
    assert 2 <= len(last.models) <= 5
    begun = static_run(recipe(steps=4, bound=1, groups=4), static_plan(made, 5, 1), asks, 0)
    steady = (tape.ended_at - tape.steps[6].ended_at) / 3
    assert steady < 0.5 * step_s(begun)
