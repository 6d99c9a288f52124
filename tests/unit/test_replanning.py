"""A plan changes when that pays, by few moves, and not otherwise; the rivals keep their rules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest

from libra_cli.core.costs.profile import TrainingShape
from libra_cli.core.costs.workload import TrajectorySample, Workload
from libra_cli.core.planning.admission import Admission
from libra_cli.core.planning.observation import (
    Decision,
    Observation,
    Replanner,
    moves_between,
    moves_cost_s,
)
from libra_cli.core.planning.recalibration import MeasuredStep
from libra_cli.core.planning.rollout_dp import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.planning.sim_replanner import (
    PLANNERS,
    PlannerError,
    SimReplanner,
    replanner,
)
from libra_cli.core.planning.triggers import COOLDOWN
from libra_cli.sim.profiles import load_profile

PROFILE = load_profile("a800-qwen3-14b")
GPUS = 32
UNIT = PlannerSettings(unit=2, groups=32)


@cache
def work(mean: float, overlap: float = 1.0) -> Workload:
    random = Random(1)
    lengths = (int(mean * random.lognormvariate(-0.3, 0.8)) for _ in range(128))
    return Workload(
        tuple(TrajectorySample(500, min(38_000, n + 1), 500, 4, 4.0) for n in lengths), 256, overlap
    )


@cache
def search_of(load: Workload) -> Search:
    return Search(PROFILE, load, GPUS, UNIT)


def observed(step: int, layout: Layout, load: Workload) -> Observation:
    """What the model itself would measure, so that predictions are right."""
    search = search_of(load)
    times = search.times(layout)
    step_s = times.step_s
    measured = MeasuredStep(step_s, times.train_s, step_s - times.train_s, 0.0, 0.0)
    if not measured.starved:
        # In play as long as makes ``unheld_s``, which is proportional to it, the predicted time.
        second = search.table.unheld_s(layout.buckets, 1.0, 100.0)
        measured = replace(measured, in_play_s=times.rollout_s / second, beside=100.0)
    return Observation(step, layout, load, measured, 1 - times.rollout_s / step_s, 0.5, GPUS)


def asked(planner: Replanner, seen: Observation) -> Decision:
    """What it says when it looks for the first time."""
    return [planner.consider(seen) for _ in range(COOLDOWN)][-1]


def play(planner: Replanner, means: list[float]) -> tuple[list[Layout], list[Decision]]:
    """A step for each mean length."""
    layout = planner.begin(work(means[0]))
    layouts, decisions = [layout], []
    for step, mean in enumerate(means):
        decision = planner.consider(observed(step, layout, work(mean)))
        layout = decision.layout or layout
        layouts.append(layout)
        decisions.append(decision)
    return layouts, decisions


def test_a_steady_workload_moves_nothing() -> None:
    layouts, decisions = play(replanner("libra", PROFILE, GPUS, settings=UNIT), [3000.0] * 25)
    assert len(set(layouts)) == 1
    assert all(decision.why_not for decision in decisions)


@pytest.mark.parametrize(("first", "then"), [(1000.0, 9000.0), (9000.0, 1000.0)])
def test_a_shift_moves_gpus_either_way(first: float, then: float) -> None:
    layouts, decisions = play(
        replanner("libra", PROFILE, GPUS, settings=UNIT), [first] * 3 + [then] * 20
    )
    moved = [decision for decision in decisions if decision.layout is not None]
    assert 1 <= len(moved) <= 2
    gained = layouts[-1].rollout_gpus - layouts[0].rollout_gpus
    assert gained > 0 if then > first else gained < 0
    best = search_of(work(then)).best()
    assert search_of(work(then)).times(layouts[-1]).step_s < best.step_s * 1.08
    assert moved[0].before is not None
    assert moved[0].after is not None
    assert moved[0].after.step_s < moved[0].before.step_s
    assert any("pays back in" in reason for reason in moved[0].reasons)


def test_no_move_before_as_many_steps_as_may_be_in_flight_have_passed() -> None:
    planner = SimReplanner(PROFILE, GPUS, UNIT)
    layout, moved = planner.begin(work(1000, overlap=6)), []
    for step, mean in enumerate([1000.0] * 2 + [9000.0] * 6 + [1000.0] * 20):
        decision = planner.consider(observed(step, layout, work(mean, overlap=6)))
        layout = decision.layout or layout
        moved += [step] if decision.layout else []
    assert len(moved) >= 2
    assert all(later - earlier >= 6 for earlier, later in pairwise(moved))


def test_a_gain_that_does_not_pay_its_moves_back_is_refused_with_numbers() -> None:
    moves = replace(PROFILE.moves, to_training_s=9e4, to_rollout_s=9e4, start_s={1: 9e4})
    profile = replace(PROFILE, moves=moves)
    planner = SimReplanner(profile, GPUS, UNIT)
    planner.begin(work(1000))
    layout = SimReplanner(PROFILE, GPUS, UNIT).begin(work(1000))
    decision = asked(planner, observed(5, layout, work(9000)))
    assert decision.layout is None
    assert "do not pay back" in decision.why_not
    assert decision.cost_s > 1000
    assert decision.payback_steps is not None


def test_near_the_end_nothing_is_moved_that_could_not_pay() -> None:
    layout = SimReplanner(PROFILE, GPUS, UNIT).begin(work(1000))
    for left, moves in ((0, False), (50, True)):
        planner = SimReplanner(PROFILE, GPUS, UNIT)
        planner.begin(work(1000))
        seen = replace(observed(5, layout, work(9000)), steps_left=left)
        assert (asked(planner, seen).layout is not None) == moves


def test_a_look_that_changed_nothing_is_not_repeated_at_once() -> None:
    planner = SimReplanner(PROFILE, GPUS, UNIT, Admission(min_gain=0.9))
    layout = planner.begin(work(1000))
    looks = [asked(planner, observed(5, layout, work(9000)))]
    assert "below 90%" in looks[0].why_not
    looks += [planner.consider(observed(step, layout, work(9000))) for step in (6, 7)]
    assert all("nothing has changed" in look.why_not for look in looks[1:])


def test_prices_are_corrected_by_what_was_measured() -> None:
    """Rollout twice as slow as predicted gets more GPUs than the profile alone would give it."""
    load = Workload((TrajectorySample(500, 4000),), 512)
    layout = SimReplanner(PROFILE, GPUS, UNIT).begin(load)
    planner = SimReplanner(PROFILE, GPUS, UNIT, Admission(min_gain=0.05))
    planner.begin(load)
    seen = observed(5, layout, load)
    slow = MeasuredStep(2 * seen.rollout_s, seen.train_s, seen.rollout_s, 0.0, 0.0)
    decision = asked(planner, replace(seen, measured=slow))
    assert decision.layout is not None
    assert decision.layout.rollout_gpus > layout.rollout_gpus


def test_of_plans_as_good_the_nearest_is_taken() -> None:
    planner = SimReplanner(PROFILE, GPUS, UNIT)
    start = planner.begin(work(1000))
    _, decisions = play(SimReplanner(PROFILE, GPUS, UNIT), [1000.0] * 2 + [9000.0] * 8)
    moved = [decision.layout for decision in decisions if decision.layout is not None]
    assert moved
    fresh = search_of(work(9000)).best().layout
    assert moved[0] is not None
    assert moves_between(start, moved[0]).gpus <= moves_between(start, fresh).gpus


def test_moves_are_the_difference_of_two_layouts() -> None:
    today = Layout((PlannedBucket(1, 8, 1000, 64), PlannedBucket(4, 2, 9000, 64)), shape(16))
    then = Layout((PlannedBucket(1, 4, 1000, 64), PlannedBucket(8, 1, 9000, 64)), shape(20))
    moves = moves_between(today, then)
    assert (moves.to_training, moves.to_rollout) == (4, 0)
    assert moves.stopped == {1: 4, 4: 2}
    assert moves.started == {8: 1}
    assert moves.gpus == 12
    assert moves_between(today, today).gpus == 0
    assert moves_cost_s(PROFILE, work(1000), today, today) == 0


def test_the_price_of_a_move_is_gpu_time_and_what_is_prefilled_again() -> None:
    today = Layout((PlannedBucket(1, 16, 1000, 64),), shape(16))
    then = Layout((PlannedBucket(1, 8, 1000, 64),), shape(24))
    load = work(1000)
    cost_s = moves_cost_s(PROFILE, load, today, then)
    again_s = 256 / 2 * load.mean_context / 2 * PROFILE.servers[1].prefill_token_s / 8
    assert cost_s == pytest.approx(8 * PROFILE.moves.to_training_s / 32 + again_s)
    other = replace(then, training=TrainingShape(2, 12))
    resized = moves_cost_s(PROFILE, load, today, other)
    assert resized == pytest.approx(cost_s + PROFILE.moves.resize_s)


def shape(ranks: int) -> TrainingShape:
    return TrainingShape(1, ranks)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_begins_with_a_layout_that_runs(name: str) -> None:
    planner = replanner(name, PROFILE, GPUS, settings=UNIT)
    assert planner.name == name
    layout = planner.begin(work(3000))
    assert layout.colocated == (name == "colocated")
    limit = 2 * GPUS if layout.colocated else GPUS
    assert layout.rollout_gpus + layout.training_gpus <= limit
    assert search_of(work(3000)).times(layout).step_s < float("inf")


@pytest.mark.parametrize("name", PLANNERS)
def test_every_layout_a_planner_moves_to_runs(name: str) -> None:
    means = [1000.0] * 3 + [9000.0] * 12 + [1500.0] * 12
    layouts, _ = play(replanner(name, PROFILE, GPUS, settings=UNIT), means)
    for layout, mean in zip(layouts[1:], means, strict=True):
        assert search_of(work(mean)).times(layout).step_s < float("inf")
    static = name in ("colocated", "uniform", "static-best")
    assert (len(set(layouts)) == 1) == static


@pytest.mark.parametrize("name", ["greedy", "streamrl", "dynarl"])
def test_a_rule_gives_the_starving_half_more(name: str) -> None:
    layouts, _ = play(replanner(name, PROFILE, GPUS, settings=UNIT), [1000.0] * 2 + [9000.0] * 15)
    assert layouts[-1].rollout_gpus > layouts[0].rollout_gpus
    assert len(layouts[-1].buckets) == 1, "equal servers"


def test_dynarl_needs_pressure_to_take_from_training() -> None:
    planner = replanner("dynarl", PROFILE, GPUS, settings=UNIT)
    layout = planner.begin(work(1000))
    seen = observed(5, layout, work(9000))
    assert planner.consider(replace(seen, queue=0.0, rollout_idle=0.5)).layout is None
    assert planner.consider(replace(seen, queue=0.9, rollout_idle=0.0)).layout is not None


def test_an_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlannerError) as error:
        replanner("oracle", PROFILE, GPUS)
    assert "libra" in error.value.hint
