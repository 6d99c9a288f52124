"""A decision says what stood against it, what binds it, and how long its steps will take."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import inf, log
from random import Random
from typing import Any

import pytest

from libra_cli.core.events import PlanChosen, PlanKept
from libra_cli.core.explanation import (
    KEPT_ERROR,
    MOVED_ERROR,
    PRICED_ERROR,
    STEPS,
    Constraint,
    Explanation,
    PastPrediction,
    Z,
    past_prediction,
    predicted_step,
)
from libra_cli.core.json_form import from_json_form
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.observation import MeasuredStep, Observation
from libra_cli.core.planning.admission import Admission
from libra_cli.core.planning.planner import Decision, Planner, binding
from libra_cli.core.planning.recipe_placement import RecipePlacement
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.workload import TrajectorySample, Workload
from tests import sample_run
from tests.unit.core.planning.test_recipe_placement import PROFILE, recipe_of, work

RECIPE = recipe_of(3, slots=2)
SETTINGS = PlannerSettings(max_num_seqs=64)


def decide(workload: Workload, **seen: Any) -> Decision:
    """For six slots of four GPUs, two of which train."""
    admission, profile = seen.pop("admission", Admission()), seen.pop("profile", PROFILE)
    planner = Planner(RecipePlacement(RECIPE), lambda plan, evidence: profile, SETTINGS, admission)
    today = seen.pop("plan", initial_plan(RECIPE))
    return planner.decide(Observation(1, today, slots_of(RECIPE), workload, **seen))


def told(decision: Decision) -> Explanation:
    assert decision.explanation is not None
    return decision.explanation


@cache
def moved() -> Decision:
    """Short trajectories: training is the longer half."""
    return decide(work(50))


def test_a_move_is_explained_by_today_the_plan_chosen_and_the_next_best() -> None:
    decision, explained = moved(), told(moved())
    assert explained.move
    assert (explained.today.step_s, explained.chosen.step_s) == (
        decision.before.step_s,
        decision.after.step_s,
    )
    assert explained.runner_up is not None
    second = explained.runner_up.option
    assert second.layout not in (explained.chosen.layout, "")
    slower = second.step_s / explained.chosen.step_s - 1
    if slower > 0:
        assert f"{slower:.1%} longer" in explained.runner_up.why_not
    else:
        assert "moves more" in explained.runner_up.why_not
    assert explained.cost_s == decision.cost_s
    assert explained.payback_steps == decision.payback_steps
    assert explained.horizon_steps == decision.horizon


def test_what_a_plan_that_stays_is_told_against_is_what_was_not_worth_it() -> None:
    decision = decide(work(50), admission=Admission(min_gain=0.99))
    explained = told(decision)
    assert decision.plan is None
    assert not explained.move
    assert explained.chosen == explained.today
    assert explained.runner_up is not None
    assert explained.runner_up.option.layout == told(moved()).chosen.layout
    assert explained.runner_up.why_not == decision.why_not == explained.why_not
    assert "is below 99%" in decision.why_not


def test_where_todays_plan_is_the_best_the_next_best_says_by_how_much() -> None:
    best = moved().plan
    assert best is not None
    explained = told(decide(work(50), plan=best))
    assert not explained.move
    assert explained.runner_up is not None
    assert explained.runner_up.option.layout != explained.today.layout


def search(gpus: int, **changes: Any) -> Search:
    workload = Workload((TrajectorySample(500, 2000),) * 4, 256)
    settings = PlannerSettings(degrees=(1, 4))
    return Search(replace(PROFILE, **changes), workload, gpus, settings)


def test_the_half_that_is_longer_binds() -> None:
    found = search(24)
    few = Layout((PlannedBucket(1, 2, 4000, 64),), 20)
    many = Layout((PlannedBucket(1, 20, 4000, 64),), 4)
    assert found.binding(many).constraint is Constraint.TRAINING
    assert found.binding(few).constraint not in (Constraint.TRAINING, Constraint.TRAINER_MEMORY)


@pytest.mark.parametrize(
    ("communication", "constraint"), [(1.0, Constraint.TRAINING), (1.01, Constraint.NETWORK)]
)
def test_training_that_talks_for_longer_than_it_computes_is_bound_by_the_network(
    communication: float, constraint: Constraint
) -> None:
    found = search(24)
    plan = replace(found.training.plan(4), communication=communication)
    assert found._binding_of_training(plan).constraint is constraint


def test_a_trainer_that_does_not_fit_is_bound_by_its_memory() -> None:
    found = search(24)
    least = found.training.least()
    assert least is not None
    assert least > 1
    too_few = Layout((PlannedBucket(1, 8, 4000, 64),), least - 1)
    assert found.binding(too_few).constraint is Constraint.TRAINER_MEMORY
    assert found.times(too_few).rollout_s == found.rollout_s(too_few.buckets, 0.0)


def test_rollout_that_can_get_no_gpu_of_the_trainer_is_bound_by_the_trainers_memory() -> None:
    found = search(24)
    least = found.training.least() or 0
    slow = Layout((PlannedBucket(1, 1, 4000, 64),), least)
    one_more = replace(slow, training_gpus=least + 1)
    assert found.times(slow).rollout_s > found.times(slow).train_s
    assert found.binding(slow).constraint is Constraint.TRAINER_MEMORY
    assert found.binding(one_more).constraint is not Constraint.TRAINER_MEMORY


def test_a_version_that_takes_longer_than_a_step_binds_it() -> None:
    found = search(24)
    layout = Layout((PlannedBucket(1, 20, 4000, 64),), 4)
    now = Observation(1, initial_plan(RECIPE), (), work(100))
    step_s = found.times(layout).step_s
    for sync_s, constraint in (
        (0.9 * step_s, Constraint.TRAINING),
        (2 * step_s, Constraint.NETWORK),
    ):
        assert (
            binding(found, layout, replace(now, sync_s=sync_s), measured=True).constraint
            is constraint
        )


# -- the interval --------------------------------------------------------------------------------


def factor(**more: Any) -> float:
    step = predicted_step(10.0, **{"moves": False, "measured": (10.0,), "past": (), **more})
    assert step.low_s < step.step_s == 10.0 < step.high_s
    assert step.high_s / 10.0 == pytest.approx(10.0 / step.low_s)
    return log(step.high_s / 10.0) / Z


def test_without_a_record_the_interval_is_the_simulators_error() -> None:
    assert factor(measured=()) == pytest.approx(PRICED_ERROR)
    assert factor() == pytest.approx(KEPT_ERROR)
    assert factor(moves=True) == pytest.approx(MOVED_ERROR)


def test_steps_that_scatter_widen_it_as_a_mean_of_several_does() -> None:
    wide = factor(measured=(5.0, 15.0))
    assert wide == pytest.approx((KEPT_ERROR**2 + 0.5**2 / STEPS) ** 0.5)


def test_a_long_record_decides_alone_and_only_of_its_own_kind() -> None:
    exact = (PastPrediction(False, 10.0, 10.1),) * 200
    wrong = (PastPrediction(True, 10.0, 20.0),) * 200
    assert factor(past=exact + wrong) < 0.02
    assert factor(past=exact + wrong, moves=True) == pytest.approx(log(2.0), rel=0.02)


def test_it_says_where_it_comes_from() -> None:
    past = (PastPrediction(True, 10.0, 12.0),) * 3
    own = predicted_step(1.0, moves=True, measured=(1.0,), past=past)
    assert own.source == "errors of 3 moves of this run"
    other = predicted_step(1.0, moves=False, measured=(1.0,), past=past)
    assert other.source == "errors of kept plans in the simulator"
    assert predicted_step(1.0, moves=True, measured=(), past=()).source == "errors of costs alone"


@pytest.mark.parametrize("number", [0, 2, 30])
def test_four_of_five_means_lie_within_it_where_errors_are_as_they_were(number: int) -> None:
    """Errors of a tenth, drawn anew; before any is known the simulator's would have to be right."""
    random, hits, tries = Random(number), 0, 2000
    for _ in range(tries):
        drawn = [random.lognormvariate(0.0, KEPT_ERROR) for _ in range(number + 1)]
        past = tuple(PastPrediction(False, 1.0, value) for value in drawn[1:])
        step = predicted_step(1.0, moves=False, measured=(1.0,), past=past)
        hits += step.low_s <= drawn[0] <= step.high_s
    assert 0.74 <= hits / tries <= 0.84


def test_a_prediction_counts_once_it_is_known_what_came() -> None:
    kept = sample_run.KEPT
    assert past_prediction(kept, 5.3) == PastPrediction(False, 5.1, 5.3)
    assert past_prediction(kept, None) is None
    assert past_prediction(None, 5.3) is None
    guessed = replace(sample_run.KEPT.predicted, corrected=False)
    first = replace(sample_run.KEPT, predicted=guessed)
    assert past_prediction(first, 5.3) is None, "an error of costs alone is of another kind"
    nothing = replace(sample_run.KEPT.predicted, step_s=inf)
    endless = json.loads(replace(sample_run.KEPT, predicted=nothing).to_json())
    assert endless["predicted"]["step_s"] is None
    assert past_prediction(from_json_form(Explanation, endless), 5.3) is None


def test_what_is_measured_and_recorded_reaches_the_decision() -> None:
    steps = (MeasuredStep(40.0, 39.0, 0.0, 100.0, 10.0),) * 3
    past = (PastPrediction(True, 10.0, 10.0), PastPrediction(False, 10.0, 10.0))
    explained = told(decide(work(50), measured=steps, predictions=past))
    kind = "moves" if explained.move else "kept plans"
    assert explained.predicted.source == f"errors of 1 {kind} of this run"


def test_what_becomes_of_a_decision_carries_its_explanation() -> None:
    assert PlanKept("no", explanation=sample_run.KEPT).explanation is sample_run.KEPT
    plan = initial_plan(RECIPE)
    assert PlanChosen(plan, (), explanation=sample_run.MOVED).explanation is sample_run.MOVED


def test_a_rule_that_holds_a_full_batch_back_binds_where_it_was_measured() -> None:
    found = search(24)
    layout = Layout((PlannedBucket(1, 16, 4000, 64),), 8)
    held = MeasuredStep(10.0, 6.0, 4.0, 100.0, 10.0, held_s=3.0)
    now = Observation(1, initial_plan(RECIPE), (), work(100), measured=(held, held))
    bound = binding(found, layout, now, measured=True)
    assert bound.constraint is Constraint.STALENESS
    assert "waits 3.0 s for groups" in bound.words
    assert binding(found, layout, now, measured=False) == found.binding(layout)
    short = replace(now, measured=(replace(held, held_s=1.0),))
    assert binding(found, layout, short, measured=True) == found.binding(layout)


def test_gradient_workers_that_the_network_does_not_let_pay_are_not_had_and_it_is_told() -> None:
    training = replace(PROFILE.training, link_bandwidth=1e9)  # 8 billion gradients take 33 s
    slow = replace(PROFILE, training=training)
    assert decide(work(50)).proposed.gradient
    assert not decide(work(50), profile=slow).proposed.gradient
    search = Search(slow, work(50), 24, SETTINGS)
    layout = RecipePlacement(RECIPE).layout_of(decide(work(50)).proposed, slots_of(RECIPE))
    assert layout.workers
    bound = search.binding(layout)
    assert bound.constraint is Constraint.NETWORK
    assert "gradient workers do not pay: the gradients of a gradient worker are 32." in bound.words
    assert "s at 1 GB/s, and 8 ranks compute a step in" in bound.words
