"""No planner is shown a trajectory, a turn or a number of turns that its recipe forbids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.bench.config import parse_drift
from libra_cli.bench.jobs import Job, playable, world_of
from libra_cli.config.recipe import LengthsSpec, Recipe
from libra_cli.core.costs.expected import guessed_lengths, samples_around
from libra_cli.core.costs.profile import NothingFits
from libra_cli.core.observation import MeasuredStep, Observation
from libra_cli.core.observed.step_work import limits_of, workload_of
from libra_cli.core.planning import recalibration, search
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.planner import Planner
from libra_cli.core.planning.search import PlannerSettings, Search
from libra_cli.core.planning.training_table import TrainingTable
from libra_cli.core.workload import TrajectoryLimits, TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from tests import world

PROFILE = load_profile("h100-qwen3-8b")
GPUS = 24
LIMITS = st.builds(
    TrajectoryLimits,
    max_len=st.integers(600, 20_000),
    max_turns=st.integers(1, 12),
    max_turn_tokens=st.integers(50, 500),
)
SAMPLES = st.lists(
    st.builds(
        TrajectorySample,
        prompt=st.integers(1, 500),
        generated=st.integers(1, 30_000),
        observed=st.integers(0, 8000),
        turns=st.integers(1, 30),
        tool_s=st.floats(0, 60),
    ),
    min_size=2,
    max_size=6,
)


@contextmanager
def seen_work() -> Iterator[list[Workload]]:
    """Every workload that a search is made for meanwhile."""
    seen: list[Workload] = []

    class Watched(Search):
        def __init__(self, *args: Any, **more: Any) -> None:
            every = [*args, *more.values()]
            seen.extend(each for each in every if isinstance(each, Workload))
            super().__init__(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for module in (search, recalibration):
            patch.setattr(module, "Search", Watched)
        yield seen


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    limits=LIMITS,
    samples=SAMPLES,
    growth=st.floats(0.7, 1.5),
    steps=st.integers(0, 12),
    measured=st.booleans(),
)
def test_whatever_lengths_do_the_planner_sees_what_may_be_played(
    limits: TrajectoryLimits,
    samples: list[TrajectorySample],
    growth: float,
    steps: int,
    measured: bool,
) -> None:
    work = Workload(tuple(samples), 64, overlap=2.0, limits=limits)
    first = Search(PROFILE, work, GPUS, PlannerSettings())
    layout = first.best().layout
    table = TrainingTable(PROFILE.training, work, GPUS)
    space = GpuPlacement.around(layout, table, max_len=limits.max_len, moves=True)
    plan, slots = space.place(layout)
    step = MeasuredStep(60.0, 40.0, 20.0, 0.0, 0.0)
    lengths = tuple(work.mean_generated * growth**at for at in range(steps))
    now = Observation(
        5, plan, slots, work, measured=(step,) * measured, lengths=lengths, steps_left=50
    )
    with seen_work() as seen:
        Planner(space, lambda plan, evidence: PROFILE).decide(now)
    assert seen
    for each in seen:
        assert all(map(limits.allow, each.samples))


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    limits=LIMITS,
    generated=st.integers(1, 30_000),
    turns=st.integers(1, 30),
    observed=st.integers(0, 9000),
)
def test_a_recipes_first_plan_is_for_what_may_be_played(
    limits: TrajectoryLimits, generated: int, turns: int, observed: int
) -> None:
    recipe = recipe_of(limits)
    told = LengthsSpec(generated=generated, prompt=100, observed=observed, turns=turns, tool_s=1.0)
    for lengths in (told, guessed_lengths(limits)):
        work = workload_of(recipe, samples_around(lengths))
        assert work.limits == limits_of(recipe) == limits
        assert all(map(limits.allow, work.samples))


def recipe_of(limits: TrajectoryLimits) -> Recipe:
    """With these limits."""
    return world.recipe(
        model={"path": "/model", "max_len": limits.max_len},
        rollout={"max_turns": limits.max_turns, "max_turn_tokens": limits.max_turn_tokens},
        training={"micro_batch_tokens": 20_000},
    )


@pytest.mark.parametrize("drift", ["1,4", "turns:1,3", "4,1"])
def test_a_bench_cuts_what_its_runs_cut(drift: str) -> None:
    trace, _ = playable(load_trace("tau2bench"), 6_000)
    job = Job(
        trace,
        PROFILE,
        PROFILE,
        GPUS,
        "libra",
        "libra",
        0,
        drift=parse_drift(drift),
        steps=4,
        groups_per_step=4,
        group_size=4,
        most_tokens=6_000,
    )
    for work in (job.workload, job.coming(2), job.guessed):
        assert work.longest.context <= job.max_len == 6_000
        assert work.stretched(3.0).longest.context <= 6_000
    with seen_work() as seen:
        world_of(job).run()
    assert len(seen) > 2
    assert max(each.longest.context for each in seen) <= 6_000


def test_without_the_cut_a_trainer_would_not_hold_what_is_expected() -> None:
    """What happened: work stretched beyond max_len had a price of infinity."""
    samples = (TrajectorySample(500, 9_000, 500, 5, 2.0),) * 4
    limits = TrajectoryLimits(10_000, 99, 10_000)
    free = Workload(samples, 64)
    short = replace(free, limits=limits)
    longest = PROFILE.training.longest_context(4)
    factor = 2 * longest / 9_000
    with pytest.raises(NothingFits):
        Search(PROFILE, free.stretched(factor), 8, PlannerSettings())
    assert Search(PROFILE, short.stretched(factor), 8, PlannerSettings()).best().times.step_s < 1e6
