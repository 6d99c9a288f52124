"""Frozen models in virtual time: what their servers take, and whom the planner gives a slot."""

from __future__ import annotations

import pytest

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.model_use import ModelUse
from libra_cli.sim.models import SimModels
from libra_cli.sim.virtual_time import VirtualTime
from tests.research.judge_slots import decided_run, recipe, static_plan, static_run, step_s

JUDGE = FrozenModelSpec(name="judge", path="/judge")


def models(asks: float) -> tuple[VirtualTime, SimModels]:
    time = VirtualTime()
    return time, SimModels(time, [JUDGE], {"judge": asks}, start_s=5.0)


def until(time: VirtualTime, end: float) -> list[tuple[float, str]]:
    """Let everything happen until then; returns the timers that fired, and when."""
    fired: list[tuple[float, str]] = []
    time.at(end, e.RunStarted())
    while True:
        what = time.next()
        if isinstance(what, e.RunStarted):
            return fired
        if isinstance(what, e.TimerFired):
            fired.append((time.now, what.name))
        elif callable(what):
            what()


def test_one_server_answers_one_after_the_other_and_another_shares_what_waits() -> None:
    time, made = models(2.0)
    for name in "abcdefg":
        made.ask(e.TimerFired(name), 0.0)
    assert until(time, 4.5) == [(2.0, "a"), (4.0, "b")]
    assert made.uses == (ModelUse("judge", 1, 4.5, 7 * 2.0 + 6 * 2.0 + 5 * 0.5, 5, 2),)
    made.perform(a.StartModel("a/0", 0, "judge"))  # it serves from 9.5 on
    assert until(time, 11.8) == [(6.0, "c"), (8.0, "d"), (10.0, "e"), (11.5, "f")]
    (use,) = made.uses
    assert use.servers == 2
    assert use.busy_s == pytest.approx(11.8 + 2.0)
    made.perform(a.StopModel("a/0", 1))
    assert made.uses[0].servers == 1
    assert until(time, 20.0) == [(12.0, "g")]


def test_one_that_is_stopped_before_it_serves_answers_nothing() -> None:
    time, made = models(2.0)
    made.perform(a.StartModel("a/0", 0, "judge"))
    until(time, 1.0)
    made.perform(a.StopModel("a/0", 1))
    for name in "ab":
        made.ask(e.TimerFired(name), 9.0)
    assert until(time, 20.0) == [(12.0, "a"), (14.0, "b")]


def test_what_is_asked_later_is_not_counted_before() -> None:
    time, made = models(2.0)
    made.ask(e.TimerFired("a"), 10.0)
    until(time, 9.0)
    assert made.uses[0].busy_s == 0.0
    until(time, 11.0)
    assert (made.uses[0].busy_s, made.uses[0].asked_s) == (1.0, 1.0)


def test_a_judge_that_holds_up_the_run_gets_slots_until_it_does_not() -> None:
    made, asks = recipe(steps=10, bound=1, groups=4), 10.0
    tape = decided_run(made, asks, 0)
    last = max(tape.plans.values(), key=lambda row: row.plan)
    assert len(last.models) >= 2
    begun = static_run(recipe(steps=4, bound=1, groups=4), static_plan(made, 5, 1), asks, 0)
    steady = (tape.ended_at - tape.steps[6].ended_at) / 3
    assert steady < 0.5 * step_s(begun)
