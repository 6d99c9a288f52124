"""How much the halves overlap follows from the staleness rule, and plans are chosen by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf
from statistics import geometric_mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.bench.jobs import Job, playable, static_run
from libra_cli.bench.regret import StaticPlans
from libra_cli.core.costs.ranges import SortedParts
from libra_cli.core.costs.rollout import EqualServers
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.observation import MeasuredStep
from libra_cli.core.planning.recalibration import recalibrated
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace

PROFILE = load_profile("a800-qwen3-14b")
IDEAL = ServerCost(1, 0.02, 0.0, 0.0, 0.0, 0.0, kv_tokens=10**9, chunk_tokens=10**9)
TOOL_S = 100.0


def longest_s(work: Workload, train_s: float) -> float:
    """Seconds of a step of which nothing but the longest trajectory binds."""
    parts = SortedParts(work, 1)
    load = parts.load(IDEAL).at((0, len(parts)))
    return float(EqualServers(IDEAL, 1, 10**6, 1.0, train_s).time(load, work).longest_s)


@given(bound=st.integers(1, 8), share=st.floats(0.0, 1.0), late=st.sampled_from([0.0, 1.0, 3.0]))
def test_a_batch_has_the_steps_in_flight_less_its_training_to_be_played(
    bound: int, share: float, late: float
) -> None:
    """(overlap + late) T = t + longest, for a training step t of up to T."""
    samples = (*[TrajectorySample(1, 1)] * 19, TrajectorySample(1, 1, tool_s=TOOL_S))
    work = Workload(samples, 640, overlap=1.0 + bound, late=late)
    step_s = (TOOL_S + 0.02) / (1 + bound + late - share)
    assert longest_s(work, share * step_s) == pytest.approx(step_s, rel=0.02)


def test_training_that_takes_longer_leaves_rollout_less_time_and_never_more() -> None:
    samples = tuple(TrajectorySample(100, 200 * n, 50, 3, 5.0) for n in range(1, 20))
    for late in (0.0, inf):
        search = Search(
            PROFILE, Workload(samples, 64, overlap=2.0, late=late), 16, PlannerSettings()
        )
        buckets = (PlannedBucket(2, 4, 9000, 128),)
        seconds = [search.rollout_s(buckets, train_s) for train_s in (0.0, 5.0, 10.0, 20.0, 1e4)]
        assert seconds == sorted(seconds)
        assert seconds[0] < seconds[-1]


@pytest.mark.parametrize(("bound", "in_turn"), [(0, True), (1, False), (4, False)])
def test_halves_take_turns_at_a_bound_of_0_only(bound: int, in_turn: bool) -> None:
    work = Workload((TrajectorySample(100, 2000),), 64, overlap=1.0 + bound)
    search = Search(PROFILE, work, 16, PlannerSettings())
    for layout, times in search.layouts():
        assert times == search.times(layout)
        assert times.in_turn is in_turn
        total_s = times.rollout_s + times.train_s
        assert (times.step_s == pytest.approx(total_s)) is (in_turn or times.step_s == inf)


def test_turns_are_told_from_one_another_by_what_was_measured() -> None:
    work = Workload((TrajectorySample(500, 2000, 200, 4, 4.0),), 64, overlap=1.0)
    today = Layout((PlannedBucket(2, 8, 9000, 128),), 16)
    priced = Search(PROFILE, work, 32, PlannerSettings()).times(today)
    measured = MeasuredStep(
        step_s=2 * priced.rollout_s + priced.train_s,
        train_s=priced.train_s,
        waited_s=2 * priced.rollout_s,
        in_play_s=0.0,
        concurrency=0.0,
    )
    found = recalibrated(PROFILE, work, 32, PlannerSettings(), today=today, measured=[measured])
    assert found.shown is not None
    assert found.shown.in_turn
    assert found.shown.rollout_s == pytest.approx(2 * priced.rollout_s)
    assert found.recalibration.training == pytest.approx(1.0)
    assert found.recalibration.rollout == pytest.approx(2**0.5), "one step weighs as the prices do"


def test_rollouts_prices_are_told_apart_from_what_training_took() -> None:
    """Training takes three times what its prices say, and rollout what its own do beside that."""
    samples = tuple(TrajectorySample(500, 300 * n, 200, 4, 4.0) for n in range(1, 17))
    work = Workload(samples, 64, overlap=2.0)
    today = Layout((PlannedBucket(2, 2, 9000, 128),), 28)
    search = Search(PROFILE, work, 32, PlannerSettings())
    train_s = 3 * search.times(today).train_s
    step_s = search.rollout_s(today.buckets, train_s)
    assert step_s > 1.1 * search.times(today).rollout_s
    measured = MeasuredStep(step_s, train_s, step_s - train_s, in_play_s=0.0, concurrency=0.0)
    found = recalibrated(PROFILE, work, 32, PlannerSettings(), today=today, measured=[measured])
    assert found.recalibration.rollout == pytest.approx(1.0)
    assert found.recalibration.training == pytest.approx(3**0.5)


ORDERS = {
    "bound 0": {"trace": "moatless", "bound": 0, "staleness": {"rule": "hold"}},
    "hold at 1": {"trace": "tau2bench", "bound": 1, "staleness": {"rule": "hold"}},
}


def test_the_law_is_right_in_the_mean_where_nobody_is_waited_for() -> None:
    """A step as predicted over one as simulated, under two rules on three traces."""
    ratios = []
    for trace in ("tau2bench", "moatless", "mint"):
        for rule in ("token", "cut"):
            job = job_on(trace, bound=1, staleness={"rule": rule}, steps=7)
            layout = StaticPlans(job).layout((4, 3))
            assert layout is not None
            _, ended = static_run(replace(job, layout=layout))
            predicted = search_of(job).times(layout).step_s
            ratios.append(predicted / ((ended[-1] - ended[2]) / 4))
    assert 0.92 < geometric_mean(ratios) < 1.08


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_static_plans_is_that_of_their_runs(case: str) -> None:
    """Simulated side by side: servers of four GPUs on 8, 12 and 16 of 24."""
    spec = dict(ORDERS[case])
    job = job_on(str(spec.pop("trace")), steps=6, **spec)
    plans, search = StaticPlans(job), search_of(job)
    layouts = [layout for n in (2, 3, 4) if (layout := plans.layout((4, n))) is not None]
    simulated = [static_run(replace(job, layout=layout))[0].makespan_s for layout in layouts]
    predicted = [search.times(layout).step_s for layout in layouts]
    assert len(layouts) == 3
    assert predicted.index(min(predicted)) == simulated.index(min(simulated))


def job_on(trace: str, **changes: Any) -> Job:
    """A short run on 24 GPUs."""
    recorded, _ = playable(load_trace(trace), 40_000)
    job = Job(recorded, PROFILE, PROFILE, 24, "libra", "fixed", 0, groups_per_step=6, group_size=4)
    return replace(job, **changes)


def search_of(job: Job) -> Search:
    """What is predicted of everything that the run plays."""
    played = islice(job.groups(), job.steps * job.groups_per_step)
    return Search(PROFILE, job.work_of(played), 24, PlannerSettings())
