"""When a better plan is looked for, and what a plan has turned out to be worth."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.notices import BoundChosen
from libra_cli.core.planning import controller
from libra_cli.core.planning.triggers import (
    COOLDOWN,
    EVERY_S,
    LEAST_ENDED,
    MORE,
    MOST_ERROR,
    OVERDUE,
    ReplanTriggers,
)
from libra_cli.core.records import DecisionRecord, PlanRecord, StepRecord
from libra_cli.core.rollout.groups import GroupState
from libra_cli.core.types import Prediction
from tests import sample_run
from tests.elastic import Scene, scene
from tests.world import explained_bound

PERIOD = 10.0


class Steps:
    """Tells the controller of a run about steps of ten seconds; its planner keeps every plan."""

    def __init__(
        self, *, kind: str = "libra", interval: int = 1000, epochs: int = 1, **training: Any
    ) -> None:
        self.world = scene(kind=kind, **training)
        recipe = self.world.recipe
        planner = recipe.planner.model_copy(update={"plan_interval": interval})
        settled = recipe.training.model_copy(update={"epochs": epochs})
        self.controller = controller.PlanController(
            recipe.model_copy(update={"planner": planner, "training": settled}),
            self.world.machine.reconciler,
            self.world.machine.plan,
        )
        self.now = 5000.0
        self.signs = {"turns a trajectory": 4.0}
        self.begun = [self.tell(0.0, 0.0) for _ in range(2)]

    def tell(self, train_idle: float, ready: float) -> str:
        """A step is done that training waited for so long, with so many groups ready for the next;
        why it looks, if so."""
        self.now += PERIOD
        step = replace(
            self.world.machine.training.last,
            started_at=self.now - (1 - train_idle) * PERIOD,
            ended_at=self.now,
            waited_s=train_idle * PERIOD,
        )
        self.controller.on_step_done(step, ready, self.signs)
        looks = self.controller.look(self.world.machine.observe)
        if looks:
            self.controller.kept(e.PlanKept("it pays nothing"), now=self.now)
        return "".join(look.why for look in looks if isinstance(look, a.Propose))

    def tell_all(self, idle: Iterable[tuple[float, float]]) -> list[str]:
        return [self.tell(*shares) for shares in idle]


FIRST = "the first steps have been measured"


def test_either_half_that_waits_starts_a_look():
    assert Steps().tell_all([(0.0, 0.0)] * 3 + [(0.5, 0.0)])[-1] == (
        "training waited for 50% of a step"
    )
    assert Steps().tell_all([(0.0, 0.0)] * 3 + [(0.0, 0.4)])[-1] == (
        "rollout waited for 40% of a step"
    )


def test_groups_that_lie_ready_are_no_waiting_while_training_waits():
    assert set(Steps().tell_all([(0.12, 0.5)] * 10)) == {"", FIRST}


def test_little_waiting_starts_none():
    assert set(Steps().tell_all([(0.14, 0.14)] * 20)) == {"", FIRST}


def test_the_first_plan_is_looked_at_once_steps_tell_something():
    looks = Steps().tell_all([(0.0, 0.0)] * 12)
    assert [index for index, look in enumerate(looks) if look] == [COOLDOWN]
    assert looks[COOLDOWN] == FIRST


def test_the_first_step_that_is_timed_is_looked_at_once():
    steps = Steps()
    assert steps.begun == ["", "the run has begun"]
    assert set(steps.tell_all([(0.0, 0.0)] * 20)) == {"", FIRST}


def test_the_same_waiting_starts_one_look_until_it_has_calmed_down():
    steps = Steps()
    looks = steps.tell_all([(0.5, 0.0)] * 10)
    assert sum(map(bool, looks)) == 1
    # Below what starts a look, and not calm either.
    assert set(steps.tell_all([(0.12, 0.0), (0.5, 0.0)] * 3)) == {""}
    assert steps.tell_all([(0.05, 0.0), (0.5, 0.0)])[-1]


def test_one_halfs_waiting_does_not_silence_the_others():
    steps = Steps()
    assert any(steps.tell_all([(0.5, 0.0)] * 5))
    assert any(steps.tell_all([(0.04, 0.5)] * 3))


def test_a_half_that_waits_for_most_of_two_steps_is_looked_at_at_once_and_after_a_rest():
    why = "training waited for 60% of a step"
    assert Steps().tell_all([(0.6, 0.0)] * 9) == ["", why, "", "", why, "", "", "", ""]


def test_one_step_that_training_waits_for_is_no_reason_to_hurry():
    assert Steps().tell_all([(0.9, 0.0), (0.05, 0.0)]) == ["", ""]


def test_steps_waited_for_before_a_move_do_not_count_after_it():
    triggers = ReplanTriggers(period=1000, overlap=1.0)
    assert triggers.due({}, {}) == "the run has begun"
    looks = []
    for moved in (False, True, False):
        if moved:
            triggers.rest()
        looks.append(triggers.due({"training": 0.6}, {}))
    assert looks == ["", "", "training waited for 60% of a step"]


@pytest.mark.parametrize(("between", "again"), [(0.3, False), (0.05, True)])
def test_a_half_is_looked_at_at_once_again_when_it_has_been_calm(between, again):
    triggers = ReplanTriggers(period=1000, overlap=20.0)
    assert triggers.due({}, {}) == "the run has begun"
    idle = (0.6, 0.6, between, 0.6, 0.6)
    looks = [bool(triggers.due({"training": share}, {})) for share in idle]
    assert looks == [False, True, False, False, again]


def test_a_step_in_which_nobody_may_look_is_no_step_of_a_streak():
    triggers = ReplanTriggers(period=1000, overlap=20.0)
    assert triggers.due({}, {}) == "the run has begun"
    looks = [
        bool(triggers.due({"training": 0.6}, {}, may=may)) for may in (True, False, True, True)
    ]
    assert looks == [False, False, False, True]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 9), st.floats(0, 0.6)), max_size=80))
def test_the_planner_is_asked_by_the_clock_as_often_as_it_may_be(
    told: list[tuple[float, int, float]],
) -> None:
    triggers, now, ended, asked, looks = ReplanTriggers(1000, 2.0), 0.0, 0, [], []

    def error(share: float) -> float:
        asked.append(now)
        return share

    for passed, more, share in told:
        now, ended = now + passed, ended + more
        if triggers.glance(ended, partial(error, share), overdue=False, now=now):
            assert share <= MOST_ERROR
            looks.append(ended)
    assert all(after - before >= EVERY_S for before, after in pairwise(asked))
    assert all(after >= MORE * before for before, after in pairwise(looks))
    assert all(count >= LEAST_ENDED for count in looks)
    triggers.due({}, {})
    assert not triggers.glance(
        10 * (ended + LEAST_ENDED), lambda: 0.0, overdue=False, now=now + EVERY_S
    )


def test_what_few_trajectories_tell_is_looked_at_once_more_of_them_have_ended() -> None:
    triggers = ReplanTriggers(1000, 2.0)
    glance = partial(triggers.glance, overdue=False)
    assert not glance(LEAST_ENDED - 1, lambda: 0.0, now=0.0)
    assert not glance(LEAST_ENDED, lambda: 1.1 * MOST_ERROR, now=1.0)
    assert not glance(LEAST_ENDED, lambda: 0.0, now=5.0)
    assert glance(LEAST_ENDED, lambda: 0.0, now=6.0) == f"{LEAST_ENDED} trajectories have ended"
    assert not glance(MORE * LEAST_ENDED - 1, lambda: 0.0, now=60.0)
    assert glance(MORE * LEAST_ENDED, lambda: 0.0, now=60.0)


def test_a_step_that_is_overdue_is_looked_at_by_the_clock_until_it_ends() -> None:
    triggers = ReplanTriggers(1000, 2.0)
    triggers.due({}, {})
    assert not triggers.by_clock
    assert not triggers.glance(LEAST_ENDED, lambda: 0.0, overdue=False, now=9.0)
    told = triggers.glance(LEAST_ENDED, lambda: 0.0, overdue=True, now=9.0)
    why = f"a step takes {OVERDUE} times the longest of late"
    assert told == f"{why}, and {LEAST_ENDED} trajectories have ended"
    assert triggers.by_clock
    assert not triggers.glance(MORE * LEAST_ENDED - 1, lambda: 0.0, overdue=True, now=60.0)
    triggers.due({}, {})
    assert not triggers.by_clock
    assert triggers.glance(LEAST_ENDED, lambda: 0.0, overdue=True, now=99.0)


def test_turns_that_have_become_more_start_a_look():
    steps = Steps()
    assert FIRST in steps.tell_all([(0.0, 0.0)] * 6)
    steps.signs = {"turns a trajectory": 8.0}
    assert steps.tell(0.0, 0.0) == "turns a trajectory went from 4 to 8"


def test_after_a_look_it_waits_out_the_cooldown():
    steps = Steps()
    assert any(steps.tell_all([(0.0, 0.0)] * 3 + [(0.5, 0.0)]))
    looks = steps.tell_all([(0.0, 0.5)] * 3)
    assert [bool(look) for look in looks] == [False, False, True]


def test_it_looks_every_so_many_steps_whatever_happens():
    looks = Steps(interval=4).tell_all([(0.0, 0.0)] * 9)
    assert [index for index, look in enumerate(looks) if look] == [3, 7]
    assert looks[3] == "4 steps have passed"


def test_a_fixed_split_is_never_looked_at():
    assert set(Steps(kind="fixed", interval=2).tell_all([(0.5, 0.0)] * 10)) == {""}


@pytest.mark.parametrize("more", [{"kind": "fixed"}, {"advantage": "gae"}], ids=str)
def test_a_bound_that_is_chosen_is_looked_for_where_no_slot_may_move(more: dict[str, Any]) -> None:
    steps = Steps(staleness="auto", interval=2, **more)
    for _ in range(2):
        steps.now += PERIOD
        done = steps.world.machine.training.last
        steps.controller.on_step_done(done, 0.0, {})
    (look,) = steps.controller.look(steps.world.machine.observe)
    assert isinstance(look, a.Propose)
    plan = look.observation.plan
    held = {slot for slot, _ in look.observation.pins}
    assert held == {*dict(plan.servers), *plan.train, *plan.gradient}
    told = steps.controller.kept(e.PlanKept("near", explanation=explained_bound(2)), now=steps.now)
    assert BoundChosen(2) in told
    rows = [one.record for one in told if isinstance(one, a.Save)]
    assert [row.bound for row in rows if isinstance(row, DecisionRecord)] == [2]


def test_no_slot_is_borrowed_for_batches_that_cannot_be_shared():
    assert set(Steps(advantage="gae", interval=2).tell_all([(0.5, 0.0)] * 10)) == {""}
    assert set(Steps(epochs=2, interval=2).tell_all([(0.5, 0.0)] * 10)) != {""}


def test_a_look_that_slots_on_their_way_prevent_is_made_when_they_have_arrived():
    steps = Steps()
    world = steps.world
    world.silent = lambda event: isinstance(event, (e.PlanKept, e.PlanChosen))
    order(world)
    assert set(steps.tell_all([(0.5, 0.0)] * 5)) == {""}
    world.arrive()
    assert steps.tell(0.5, 0.0) == "training waited for 50% of a step"


@pytest.mark.parametrize("starved", [True, False])
def test_a_planner_is_shown_which_share_of_groups_lies_ready_unless_training_waited(starved):
    world = scene()
    count = world.machine.ledger.count

    def both() -> bool:
        seen = world.machine.observe()
        if not (seen and seen.measured and seen.measured[-1].starved is starved):
            return False
        return count(GroupState.READY) > 0 and count(GroupState.OPEN) > 0

    world.until(both)
    seen, ready = world.machine.observe(), count(GroupState.READY)
    assert seen is not None
    assert seen.rollout_idle == (0.0 if starved else ready / (ready + count(GroupState.OPEN)))
    assert seen.steps_left == 1000 - world.machine.training.step


def order(world: Scene) -> None:
    if not world.machine.controller._awaiting:
        assert world.order(gradient=1).accepted


def plans(world: Scene) -> list[PlanRecord]:
    """The newest row of every plan, in order."""
    return list({row.plan: row for row in world.rows(PlanRecord)}.values())


def chosen(world: Scene, promise: Prediction | None) -> None:
    """One server less, one worker more."""
    plan = world.machine.reconciler.plan(())
    (slot, _), *rest = plan.servers
    plan = replace(plan, servers=tuple(rest), gradient=(*plan.gradient, slot))
    world.give(e.PlanChosen(plan, world._slots, promise))


def step_seconds(world: Scene) -> list[float]:
    ends = [step.ended_at for step in world.rows(StepRecord) if not step.checkpoint]
    return [after - before for before, after in pairwise(ends)]


def test_what_was_promised_and_what_was_seen_stand_in_the_plans_row():
    world = scene()
    world.steps_on(6)
    chosen(world, Prediction(9.0, 7.0, 30.0))
    before = step_seconds(world)[-controller.WINDOW :]
    row = plans(world)[-1]
    assert (row.predicted_before_s, row.predicted_after_s, row.cost_s) == (9.0, 7.0, 30.0)
    assert row.observed_before_s == pytest.approx(sum(before) / len(before))
    assert row.observed_after_s is None
    world.arrive()
    arrived = world.machine.training.step
    world.steps_on(controller.WINDOW)
    assert plans(world)[-1].observed_after_s is None, "the step of the arrival does not count"
    world.steps_on(1)
    after = step_seconds(world)[arrived : arrived + controller.WINDOW]
    assert plans(world)[-1].observed_after_s == pytest.approx(sum(after) / len(after))


def test_a_plan_replaced_early_is_what_the_next_one_is_compared_with():
    world = scene()
    world.steps_on(6)
    chosen(world, None)
    world.arrive()
    arrived = world.machine.training.step
    world.steps_on(3)
    chosen(world, None)
    seen = step_seconds(world)[arrived:]
    assert len(seen) == 2
    first, second = plans(world)[-2:]
    assert first.observed_after_s is None
    assert second.observed_before_s == pytest.approx(sum(seen) / len(seen))


def test_an_order_promises_nothing_and_is_observed_all_the_same():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    world.steps_on(controller.WINDOW + 1)
    row = plans(world)[-1]
    assert (row.cause, row.predicted_after_s) == ("order", None)
    assert row.observed_after_s is not None


def decisions(world: Scene) -> list[DecisionRecord]:
    """The newest row of every decision, in order."""
    return list({row.at: row for row in world.rows(DecisionRecord)}.values())


def kept(world: Scene) -> None:
    world.give(e.PlanKept("a gain of 4.1% is below 8%", explanation=sample_run.KEPT))


def test_a_decision_is_kept_with_its_explanation_and_what_came_after_it():
    world = scene()
    world.steps_on(6)
    kept(world)
    at = world.machine.training.step
    assert json.loads(decisions(world)[-1].explanation_json) == json.loads(
        sample_run.KEPT.to_json()
    )
    world.steps_on(controller.WINDOW - 1)
    assert decisions(world)[-1].observed_s is None
    world.steps_on(3)
    row, came = decisions(world)[-1], step_seconds(world)[at - 1 :][: controller.WINDOW]
    assert row.observed_s == pytest.approx(sum(came) / len(came))
    assert row.observed_steps == controller.WINDOW


def test_what_came_ends_with_the_next_decision():
    world = scene()
    world.steps_on(6)
    kept(world)
    world.steps_on(2)
    kept(world)
    first, second = decisions(world)[-2:]
    assert first.observed_steps == 2
    assert second.observed_s is None


def test_after_a_move_only_steps_with_all_slots_in_place_count():
    world = scene()
    world.steps_on(6)
    plan = world.machine.reconciler.plan(())
    (slot, _), *rest = plan.servers
    plan = replace(plan, servers=tuple(rest), gradient=(*plan.gradient, slot))
    world.give(e.PlanChosen(plan, world._slots, explanation=sample_run.MOVED))
    world.arrive()
    arrived = world.machine.training.step
    assert decisions(world)[-1].observed_s is None
    world.steps_on(controller.WINDOW + 1)
    came = step_seconds(world)[arrived : arrived + controller.WINDOW]
    assert decisions(world)[-1].observed_s == pytest.approx(sum(came) / len(came))
    assert plans(world)[-1].observed_after_s == decisions(world)[-1].observed_s


def test_an_explanation_of_what_is_not_done_is_not_kept():
    world = scene()
    world.steps_on(6)
    plan = world.machine.reconciler.plan(())
    world.give(e.PlanChosen(plan, world._slots, explanation=sample_run.MOVED))
    row = decisions(world)[-1]
    assert (row.plan, row.explanation_json) == (None, "{}")
    assert row.why_not == "the plan is today's already"


def test_the_first_plan_is_a_decision_where_a_planner_made_it():
    steps = Steps()
    first = sample_run.KEPT.of_first_plan()
    begun = steps.controller.begin(first, step=0, now=7.0)
    plan, decision = (saved.record for saved in begun if isinstance(saved, a.Save))
    assert isinstance(plan, PlanRecord)
    assert isinstance(decision, DecisionRecord)
    assert (plan.plan, plan.cause) == (0, "start")
    assert (decision.plan, decision.step, decision.why) == (0, 0, "the run begins")
    assert json.loads(decision.explanation_json)["move"] is False
    assert len(steps.controller.begin(None, step=0, now=7.0)) == 1


@pytest.mark.parametrize(("factor", "moves"), [(0.99, False), (1.01, True)])
@pytest.mark.parametrize(("steps", "overdue"), [(0, False), (6, False), (6, True)])
def test_before_a_step_has_been_timed_a_plan_has_to_be_better_by_more_than_predictions_err(
    factor: float, *, moves: bool, steps: int, overdue: bool
):
    world = scene(kind="libra")
    world.until(lambda: world.machine.observe() is not None)
    if steps:
        world.steps_on(steps)
    made = world.machine.controller
    if steps and not overdue:
        made._due = ("a step has ended", "")
    else:
        assert made.glance(MORE * LEAST_ENDED, lambda: 0.0, overdue=overdue, now=1e6)
    assert made.look(world.machine.observe)
    # A step that ends while the planner thinks does not make it surer.
    made._triggers.due({}, {})
    plan = world.machine.reconciler.plan(())
    (slot, _), *rest = plan.servers
    plan = replace(plan, servers=tuple(rest), gradient=(*plan.gradient, slot))
    told = sample_run.MOVED
    before_s = told.chosen.step_s * controller.UNTIMED_GAIN * factor
    told = replace(told, today=replace(told.today, step_s=before_s))
    made.chosen(e.PlanChosen(plan, world._slots, explanation=told), now=9.0)
    assert (world.machine.plan == plan) is (moves or (steps > 0 and not overdue))


@pytest.mark.parametrize(("kind", "asks"), [("libra", True), ("fixed", False)])
def test_the_planner_is_asked_by_the_clock_where_it_may_move_slots(kind: str, asks: bool) -> None:
    world = scene(kind=kind)
    world.until(lambda: world.machine.observe() is not None)
    made = controller.PlanController(world.recipe, world.machine.reconciler, world.machine.plan)
    made.glance(LEAST_ENDED, lambda: 0.0, overdue=False, now=3.0)
    looks = made.look(world.machine.observe)
    assert [look.why for look in looks if isinstance(look, a.Propose)] == (
        [f"{LEAST_ENDED} trajectories have ended"] if asks else []
    )


def looks_since(world: Scene, number: int) -> list[a.Propose]:
    return [act for act in world.log[number:] if isinstance(act, a.Propose)]


def test_a_step_that_does_not_end_is_looked_at_with_what_has_begun_in_it_alone() -> None:
    world = scene(kind="libra")
    world.steps_on(6)
    world.silent = lambda event: isinstance(event, e.StepDone)
    began = len(world.log)
    late = f"a step takes {OVERDUE} times the longest of late"
    world.until(lambda: any(late in look.why for look in looks_since(world, began)))
    look = looks_since(world, began)[-1]
    assert not look.observation.measured
    assert not look.observation.lengths
    assert look.observation.workload.samples
    assert look.observation.recalibration == world.machine.controller.corrected
    world.until(lambda: not world.machine.controller._busy)
    world.give(e.PlanOrdered("order-0", (), ()))
    ordered = looks_since(world, began)[-1]
    assert ordered.order
    assert ordered.observation.measured
