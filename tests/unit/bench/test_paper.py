"""``libra bench paper``: the declared workloads, every published result, and the page of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.bench.jobs import Job, run_job
from libra_cli.bench.paper import accuracy, cost_model, planning, streaming, systems
from libra_cli.bench.paper.cost_model import Point, cost_model_table
from libra_cli.bench.paper.experiment import NOT_SHOWN
from libra_cli.bench.paper.tables import AS_PUBLISHED, QUICK, SHIPPED, Figure, PaperScale
from libra_cli.bench.paper.workloads import GROUP_SIZE, GROWTH, R2E, WORKLOADS
from libra_cli.bench.report.paper import told
from libra_cli.bench.routing import RULES, RoutingRow
from libra_cli.cli.main import app
from libra_cli.core.types import ToolOutcome
from tests.sample_bench import row

TITLES = (
    "tool returns by length of the trajectory",
    "growth and crossover",
    "tokens a second of 8 GPUs",
    "routing: the right bucket of three",
    "throughput of whole systems",
    "ablation on R2E-Gym, each over the line before",
    "StreamRL, each over the line before",
    "error of the cost model",
    "time of the planner",
    "what a switch costs",
    "published, and not shown here",
)
LINES = (
    *("rollout, 32K over 1K", "training, 32K over 1K", "0-2K: 8 x TP 1", "16-32K: TP 8 over"),
    *(
        f"{length}, {8 // n} x TP {n}"
        for length in ("0K to 2K", "16K to 32K")
        for n in (1, 2, 4, 8)
    ),
    *("published tree", "attained service", "tokens moved", "a predictor by embeddings"),
    *(f"{name}: libra" for name in WORKLOADS),
    *("libra over colocated", "libra over uniform", "libra over best static at start"),
    *("libra over greedy", "libra over streamrl", "libra over dynarl"),
    *("static uniform", "+ planner", "+ heterogeneous TP", "+ C-MLFQ", "+ elastic pool"),
    *("+ streaming", "+ longest fifth known", "+ asynchronous"),
    *("rollout, mean", "training, mean", "a step, mean", "a step, the worst"),
    *("128 GPUs, alike servers", "128 GPUs, mixed servers"),
    *("GPUs from rollout to training", "GPUs from training to rollout", "share of a run"),
)
"""The beginnings of lines that the page must have."""


# -- the declared workloads ------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_every_time_and_as_long_as_published(name: str) -> None:
    trace = WORKLOADS[name].trace
    assert trace == WORKLOADS[name].trace
    assert {len(trials) for trials in trace.by_task().values()} == {GROUP_SIZE}
    mean = fmean(one.generated for one in trace.episodes)
    assert mean == pytest.approx(2_500, rel=0.2)
    assert GROWTH.factors[-1] * 2.5 == pytest.approx(11.5)


def test_tools_of_r2e_gym_return_what_is_published_for_each_length() -> None:
    ends = [(one.context, one.context - one.prompt - one.generated) for one in R2E.trace.episodes]
    short = fmean(tool for context, tool in ends if context < 8_000)
    long = fmean(tool for context, tool in ends if 18_000 < context < 24_000)
    assert short == pytest.approx(1_000, rel=0.25)
    assert long == pytest.approx(12_500, rel=0.25)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_longest_tenth_of_a_workload_failed_more_often(name: str) -> None:
    episodes = sorted(WORKLOADS[name].trace.episodes, key=lambda one: one.generated)
    tenth = len(episodes) // 10

    def failed(some: Sequence[Any]) -> float:
        calls = [turn.outcome for one in some for turn in one.turns if turn.outcome is not None]
        return fmean(outcome is ToolOutcome.ERROR for outcome in calls)

    assert failed(episodes[-tenth:]) > 2 * failed(episodes[: 5 * tenth])


def test_siblings_are_more_alike_than_strangers() -> None:
    groups = list(R2E.trace.by_task().values())
    means = [fmean(one.generated for one in group) for group in groups]
    every = [one.generated for group in groups for one in group]
    whole = fmean(every)
    chance = fmean((length - whole) ** 2 for length in every) / GROUP_SIZE
    assert fmean((mean - whole) ** 2 for mean in means) > 2 * chance


# -- what is simulated -----------------------------------------------------------------------------


def test_the_cost_model_is_held_against_runs_that_really_are_simulated() -> None:
    table = cost_model_table(PaperScale(seeds=1, steps=2, groups=1, points=1), lambda _: None)
    assert [row.what for row in table.rows][-1] == "a step, the worst"
    assert table.title.endswith(", 1 static plans")
    for line in table.rows:
        assert isinstance(line.shipped, Figure)
        assert isinstance(line.as_published, Figure)
        assert 0 < line.shipped.value < 2


class Invented:
    """What runs would have said, without simulating them; keeps the jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(
        self, run: Callable[[Job], Any], jobs: Sequence[Job], progress: Callable[[str], None]
    ) -> Iterator[Any]:
        self.jobs += jobs
        for job in jobs:
            progress(f"{job.planner}")
            made = row(policy=job.policy, planner=job.planner, seed=job.seed)
            if run is cost_model._point:
                yield Point(0.1, -0.2, None if job.bound else 0.05)
            else:
                yield (made, None) if run is run_job else systems.SystemRun(made, 0.01)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invented:
    made = Invented()
    monkeypatch.chdir(tmp_path)
    for module in (systems, streaming, cost_model):
        monkeypatch.setattr(module, "simulated", made)
    monkeypatch.setattr(accuracy, "routing", _routing)
    monkeypatch.setattr(planning, "PLANNED", ((128, "12.3 s"),))  # larger ones take seconds
    monkeypatch.setattr(planning, "REPEATS", 1)
    return made


def _routing(traces: Sequence[Any], seeds: int, progress: Any) -> list[RoutingRow]:
    return [
        RoutingRow(rule, trace.name, seed, 9, 0.5, 0.4, 0.1)
        for trace in traces
        for seed in range(seeds)
        for rule in RULES
    ]


def libra(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", "paper", *arguments])


def test_the_page_and_the_terminal_hold_every_published_result(invented: Invented) -> None:
    done = libra("--quick", "--out", "page")
    assert done.exit_code == 0, done.output
    page = unescape(Path("page/bench.html").read_text(encoding="utf-8"))
    for words in (*TITLES, *LINES):
        assert words in done.output
        assert words in page
    assert max(map(len, done.output.splitlines())) <= 80
    for what, _ in NOT_SHOWN:
        assert what in page
    assert "why they differ" in page
    assert "1,852 tok/s" in page


def test_every_system_plays_every_workload_by_both_prices(invented: Invented) -> None:
    assert libra("--quick").exit_code == 0
    played = {(job.profile.name, job.trace.name, job.planner) for job in invented.jobs}
    for prices in (SHIPPED, AS_PUBLISHED):
        for workload in WORKLOADS:
            for planner in ("colocated", "uniform", "static-best", "greedy", "streamrl", "dynarl"):
                assert (prices, workload, planner) in played
            assert (prices, workload, "libra") in played
    assert {job.steps for job in invented.jobs if job.planner == "libra"} == {QUICK.steps}
    mixed = {job.policy for job in invented.jobs if job.shapes == "mixed"}
    assert "cmlfq" in mixed


def test_the_json_has_every_number_with_its_unit(invented: Invented) -> None:
    done = libra("--quick", "--json", "-")
    assert done.exit_code == 0, done.output
    told_tables = json.loads(done.stdout)["paper"]["tables"]
    by_title = {table["title"]: table for table in told_tables}
    first = by_title["growth and crossover"]["rows"][0]
    assert first["published"] == {"value": 95.0, "unit": "times", "ci95": None}
    assert all(table["why"] for table in told_tables)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (None, ""),
        ("3.1 to 5.9 %", "3.1 to 5.9 %"),
        (Figure(0.63, "change"), "+63.0 %"),
        (Figure(0.1, "change", (0.05, 0.15)), "+10.0 ± 5.0 %"),
        (Figure(0.082, "share"), "8.2 %"),
        (Figure(1852.0, "tok/s"), "1,852 tok/s"),
        (Figure(3.1, "times"), "3.1 times"),
    ],
)
def test_a_figure_has_its_unit(what: Figure | str | None, words: str) -> None:
    assert told(what) == words


def test_where_no_line_can_be_drawn_over_every_part_is_told_once(invented: Invented) -> None:
    told_lines = libra("--quick", "--json", "-").stderr.split("\n")
    assert [told_lines.count(part) for part in ("systems", "StreamRL", "cost model")] == [1, 1, 1]
