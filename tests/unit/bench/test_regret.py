"""Regret is measured against plans that were simulated, and by the seed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.bench import regret as regrets_bench
from libra_cli.bench.clairvoyance import TOLD, OraclePlanner
from libra_cli.bench.config import parse_drift
from libra_cli.bench.jobs import Job, first_layout_of, playable, static_run, world_of
from libra_cli.bench.regret import StaticPlans, best_script, part_seconds, regrets
from libra_cli.bench.regret_causes import CAUSES, PlannedStep
from libra_cli.bench.report.sheets import regret_sheet
from libra_cli.bench.results import BEST_STATIC, CLAIRVOYANT, FREE_CLAIRVOYANT, LIBRA_TOLD, SHARED
from libra_cli.cli.main import app
from libra_cli.core.observation import MeasuredStep, Observation
from libra_cli.core.planning.admission import expected_change
from libra_cli.core.planning.search import Layout
from libra_cli.core.types import Plan
from libra_cli.core.workload import BatchOverhead, TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from tests.sample_bench import row

PROFILE = load_profile("a800-qwen3-14b")
TRACE, _ = playable(load_trace("mint"), 59_177)
JOB = Job(
    TRACE,
    PROFILE,
    PROFILE,
    16,
    "libra",
    "libra",
    0,
    drift=parse_drift("1,4"),
    steps=8,
    groups_per_step=2,
    group_size=4,
    bound=1,
)


@pytest.fixture(scope="module")
def plans() -> StaticPlans:
    return StaticPlans(JOB)


def test_oversampled_members_are_played_and_the_first_that_end_are_trained() -> None:
    recording = world_of(replace(JOB, steps=2, oversample=2)).run()
    assert recording.ended_at > 0
    surplus = [step.batch["surplus_tokens"] or 0.0 for step in recording.steps]
    assert sum(surplus) > 0
    ended = Counter(row.group_id for row in recording.trajectories)
    assert {ended[group] for group in recording.groups} == {4}
    members = {row.member for row in recording.trajectories if row.group_id in recording.groups}
    assert members > set(range(4))


def test_the_work_of_oversampled_groups_is_theirs() -> None:
    assert replace(JOB, oversample=2).workload.extras == BatchOverhead(surplus=0.5)
    assert replace(JOB, oversample=2).workload.trajectories == 8


def test_groups_that_a_drift_filters_are_played_and_not_trained() -> None:
    job = replace(JOB, steps=4, drift=parse_drift("filtered:0.5,0.5"))
    steps = world_of(job).run().steps
    assert sum(step.batch["groups_filtered"] or 0 for step in steps) > 0
    assert all(step.batch["share_without_signal"] == 0 for step in steps)


def test_contexts_that_grow_are_cut_where_a_run_would_take_none() -> None:
    job = replace(JOB, steps=2, drift=parse_drift("contexts:8,8"), most_tokens=4_096)
    every = [one for _, group in zip(range(8), job.groups(), strict=False) for one in group]
    assert max(one.context for one in every) == 4_096
    assert world_of(job).run().steps


def servers(layouts: list[Layout]) -> set[tuple[int, int]]:
    return {(one.buckets[0].tensor_parallel, one.buckets[0].servers) for one in layouts}


def test_the_first_static_plans_are_of_every_degree_and_share(plans: StaticPlans) -> None:
    first = servers(plans.first())
    assert first >= {(1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)}
    assert all(one.rollout_gpus + one.training_gpus <= 16 for one in plans.first())


def test_the_next_static_plans_are_around_the_best_of_the_two_best_degrees(
    plans: StaticPlans,
) -> None:
    tried = {plans.layout(shape): tokens for shape, tokens in THROUGHPUTS.items()}
    known = {layout: tokens for layout, tokens in tried.items() if layout is not None}
    wanted = servers(plans.next(known))
    assert wanted
    assert {degree for degree, _ in wanted} <= {1, 2}
    assert wanted.isdisjoint(THROUGHPUTS)


THROUGHPUTS = {(1, 4): 80.0, (1, 8): 100.0, (2, 2): 70.0, (2, 4): 95.0, (4, 1): 60.0, (8, 1): 50.0}


def test_looking_for_the_best_static_plan_ends_at_it(plans: StaticPlans) -> None:
    """On throughputs with one top, at five servers of two GPUs."""

    def throughput(layout: Layout) -> float:
        degree = layout.buckets[0].tensor_parallel
        return 100.0 - abs(layout.rollout_gpus - 10) - 5 * abs(degree - 2)

    tried = {layout: throughput(layout) for layout in plans.first()}
    while wanted := plans.next(tried):
        tried |= {layout: throughput(layout) for layout in wanted}
    best = max(tried, key=lambda layout: tried[layout])
    assert best.buckets[0].tensor_parallel == 2
    assert abs(best.rollout_gpus - 10) <= 2
    assert len(tried) < 20


def test_parts_of_a_run_add_up_to_it() -> None:
    ended = [3.0, 5.0, 9.0, 10.0, 12.0, 20.0, 21.0, 30.0]
    assert part_seconds(ended) == [5.0, 5.0, 10.0, 10.0]


def test_a_script_changes_the_plan_where_that_pays_its_moves(plans: StaticPlans) -> None:
    early = plans.layout((2, 3))
    assert early is not None
    late = replace(early, buckets=(replace(early.buckets[0], servers=4),))
    runs = {early: [1.0, 2.0, 5.0, 8.0], late: [3.0, 6.0, 7.0, 8.0]}
    assert best_script(runs, lambda today, then: 0.0) == (early, early, late, late)
    dear = best_script(runs, lambda today, then: 10.0 * (today != then))
    assert len(set(dear)) == 1


@pytest.mark.parametrize("measured", [0, 2])
def test_who_is_told_the_work_to_come_expects_no_growth_and_knows_what_was_trained(
    measured: int,
) -> None:
    asked: list[Observation] = []
    planner: Any = SimpleNamespace(decide=asked.append)
    was, told = (Workload((TrajectorySample(9, n, 9, 1, 1.0),), 8) for n in (300, 900))
    step = MeasuredStep(2.0, 1.0, 1.0, 0.0, 0.0)
    lengths = (100.0, 200.0, 300.0)
    now = Observation(3, Plan((), ()), (), was, measured=(step,) * measured, lengths=lengths)
    OraclePlanner(planner, lambda step: told).decide(now)
    assert asked[0].workload is told
    assert expected_change(asked[0].lengths, 10, told.spread) == 1.0
    assert fmean(asked[0].lengths) == fmean(lengths[-measured:])


@pytest.mark.parametrize("planner", [TOLD, CLAIRVOYANT])
def test_a_planner_that_knows_the_future_plays_the_whole_run(
    plans: StaticPlans, planner: str
) -> None:
    script: tuple[Layout, ...] = ()
    if planner == CLAIRVOYANT:
        found = [plans.layout((2, 2)), plans.layout((2, 4))]
        script = tuple(one for one in found if one is not None)
    start = script[0] if script else None
    world = world_of(replace(JOB, planner=planner, start=start, script=script))
    world.run()
    assert len(world.recording.steps) == JOB.steps
    if script:
        shapes = [bucket.tensor_parallel for _, bucket in world.machine.plan.servers]
        assert shapes == [2] * 4, "the second part has its own plan"


def test_a_planner_that_moves_may_begin_anywhere(plans: StaticPlans) -> None:
    worst = plans.layout((1, 4))
    assert worst is not None
    world = world_of(replace(JOB, start=worst))
    assert len(world.machine.plan.servers) == 4
    assert first_layout_of(JOB, JOB.workload) != worst


def test_the_coming_work_is_that_of_the_steps_that_may_be_in_flight() -> None:
    assert len(JOB.coming(0).samples) == 2 * JOB.groups_per_step * JOB.group_size
    assert JOB.coming(6).mean_generated > 1.5 * JOB.coming(0).mean_generated


NOTHING_KNOWN: dict[tuple[str, int], dict[str, float]] = defaultdict(
    lambda: dict.fromkeys(CAUSES, 0.0)
)


TOLD_AT_ONCE: dict[tuple[str, int], float] = defaultdict(
    lambda: row(makespan_s=125.0).throughput_tok_s
)


def test_regret_is_what_the_best_static_plan_has_more() -> None:
    makespans = {
        BEST_STATIC: 100.0,
        CLAIRVOYANT: 80.0,
        "uniform": 125.0,
        "libra": 100.0,
        "libra, guess start": 100.0,
        "libra, half start": 90.0,
        "libra, worst start": 200.0,
    }
    rows = [
        row("libra", seed, makespan_s + seed, planner=name, variant="drift x1 x4")
        for seed in range(2)
        for name, makespan_s in makespans.items()
    ]
    own, _, half, worst = regrets(rows, NOTHING_KNOWN, TOLD_AT_ONCE)
    assert (own.start, half.start, worst.start) == ("own", "half", "worst")
    assert own.regret == own.share_of_clairvoyant == 0.0
    assert worst.regret == pytest.approx(0.5, abs=0.01)
    assert half.regret == pytest.approx(-0.11, abs=0.01)
    assert half.of_start == pytest.approx(0.2, abs=0.01)
    assert half.share_of_clairvoyant == pytest.approx(0.44, abs=0.01)
    assert own.over_uniform == pytest.approx(0.25, abs=0.01)
    sheet = regret_sheet([own, half, worst])
    assert [cells[1] for cells in sheet.rows] == ["own", "half", "worst"]
    assert "at most +49.9 %" in sheet.notes[0]


def test_a_share_of_next_to_nothing_is_not_told() -> None:
    rows = [
        row(planner=name, makespan_s=makespan_s)
        for name, makespan_s in {
            BEST_STATIC: 100.0,
            CLAIRVOYANT: 99.5,
            "uniform": 125.0,
            "libra": 100.0,
            "libra, guess start": 100.0,
            "libra, half start": 90.0,
            "libra, worst start": 200.0,
        }.items()
    ]
    assert {one.share_of_clairvoyant for one in regrets(rows, NOTHING_KNOWN, TOLD_AT_ONCE)} == {
        None
    }


# -- the whole experiment, with invented runs ------------------------------------------------------


def _steps(ended: tuple[float, ...]) -> tuple[PlannedStep, ...]:
    return tuple(PlannedStep(at, 0.0, {1: 3}, looked=True) for at in ended)


class InventedRuns:
    """Throughput falls with the distance from eight servers of one GPU; movers lose a tenth."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(
        self, run: Callable[[Job], Any], jobs: Sequence[Job], progress: Callable[[str], None]
    ) -> Iterator[Any]:
        for job in jobs:
            self.jobs.append(job)
            layout = job.layout or job.start
            far = abs(layout.rollout_gpus - 8) if layout else 2
            made = row(planner=job.planner, seed=job.seed, makespan_s=100.0 + far + job.seed)
            made = replace(made, trace=job.trace.name, variant=job.variant)
            ended = tuple(made.makespan_s * (step + 1) / job.steps for step in range(job.steps))
            yield (made, ended) if run is static_run else (made, None, _steps(ended))


def test_every_contender_plays_every_seed_and_the_report_tells_the_regret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    invented = InventedRuns()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(regrets_bench, "simulated", invented)
    arguments = ["--trace", "mint", "--drift", "4 turns:1,2", "--seeds", "2", "--gpus", "16"]
    command = ["bench", "regret", *arguments, "--json", "told.json", "--out", "."]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    told = json.loads(Path("told.json").read_text())
    names = {BEST_STATIC, SHARED, CLAIRVOYANT, FREE_CLAIRVOYANT, LIBRA_TOLD}
    names |= {"uniform", "libra"}
    for drift in ("drift x1 x4", "drift turns x1 x2"):
        rows = [one for one in told["rows"] if one["variant"] == drift]
        assert {one["planner"] for one in rows} >= names
        assert len(rows) == 2 * 10
        starts = [one["start"] for one in told["regret"] if one["variant"] == drift]
        assert starts == ["own", "guess", "half", "worst"]
        told_jobs = [job for job in invented.jobs if job.variant == drift and job.script]
        assert [job.regroups for job in told_jobs].count(True) == 2 * 4
        assert [job.script == (job.start,) for job in told_jobs].count(True) >= 2 * 4
        lost = {one["start"]: one["of_start"] for one in told["regret"]}
        assert abs(lost["half"]) < 0.02 < lost["worst"]
    for one in told["regret"]:
        assert sum(one["causes"].values()) == pytest.approx(one["regret"])
        assert one["causes"]["wrong plan"] == 0.0
    assert "wrong price" in Path("bench.html").read_text()
    assert "turns x1 x2 worst" in done.output.replace("  ", " ")
    assert "regret" in Path("bench.html").read_text()
    on_second = [job for job in invented.jobs if job.seed == 1 and job.layout]
    on_first = [job for job in invented.jobs if job.seed == 0 and job.layout]
    assert 0 < len(on_second) < len(on_first), "only the best are simulated on every seed"
