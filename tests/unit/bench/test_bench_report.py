"""``libra bench``: its words, its table, its page, and what it does with wrong arguments."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import libra_cli
from libra_cli.bench import experiments
from libra_cli.bench.config import parse_names
from libra_cli.bench.contenders import POLICIES
from libra_cli.bench.report.html import bench_page
from libra_cli.bench.report.terminal import amount, change, comparison_view
from libra_cli.bench.results import compare
from libra_cli.cli import bench, reports
from libra_cli.cli.main import app
from libra_cli.config.errors import ExitCode
from libra_cli.sim.traces import load_trace, shipped_traces
from tests.sample_bench import MAKESPANS, PLANNERS, Runs, result, rows, timeline

SCHEDULE, PLAN = "policies on a fixed plan", "planners with libra"
LIMIT_BYTES = 2_000_000


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    """No simulation; without the timelines of runs the report has few drawings."""
    invented = Runs()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "run_jobs", invented)
    return invented


def libra(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80"})


def shown(view: Any, *, width: int = 80, encoding: str = "utf-8") -> str:
    file = StringIO()
    console = Console(file=file, width=width, _environ={})
    console.print(view)
    return file.getvalue()


# -- words and table -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (0.42, "0.42"),
        (9.994, "10"),
        (12.34, "12.3"),
        (99.96, "100"),
        (312.4, "312"),
        (9120, "9,120"),
        (12340, "12.3k"),
        (99960, "100k"),
        (999_999, "1M"),
        (3_412_000, "3.41M"),
        (1.2e9, "1.2G"),
    ],
)
def test_an_amount_is_short(value: float, words: str) -> None:
    assert amount(value) == words


@pytest.mark.parametrize("planners", [False, True])
def test_the_table_fits_80_columns_with_nothing_cut_off(planners: bool) -> None:
    (comparison,) = result(PLANNERS if planners else MAKESPANS, planners=planners).comparisons
    text = shown(comparison_view("policies on a fixed plan", comparison))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for name in comparison.names:
        assert re.search(rf"^ . {name} .*\d", text, flags=re.MULTILINE), name


def test_the_table_marks_the_best_and_what_is_level_with_it() -> None:
    (comparison,) = compare(rows({"least-loaded": 1.2, "heddle": 1.001, "libra": 1.0}, noise=0.01))
    lines = shown(comparison_view("x", comparison)).splitlines()
    marks = {words[1]: words[0] for line in lines if len(words := line.split()) > 3}
    assert marks["libra"] == "*"
    assert marks["heddle"] == "≈"
    assert "≈" not in next(line for line in lines if "least-loaded" in line)


def test_the_verdict_says_when_libra_is_no_better() -> None:
    (comparison,) = compare(rows({"least-loaded": 1.0, "libra": 1.001}, noise=0.01))
    assert "(not significant) against least-loaded" in shown(comparison_view("x", comparison))


def test_a_baseline_has_no_difference_to_itself() -> None:
    assert change(None) == "–"


# -- the page --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The tags of a page, its ids, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(value or "")


def page(*, slots: int = 12, timelines: int = 2) -> str:
    policies = result(notes=["a <note>"])
    policies.timelines.extend(
        timeline(f"policy-{index}", slots=slots) for index in range(timelines)
    )
    planners = result(PLANNERS, planners=True)
    return bench_page(
        [policies, planners], about="48 A800", command="libra bench", warnings=["be warned"]
    )


def test_the_page_needs_nothing_else_and_has_no_script() -> None:
    text = page()
    parsed = Page(text)
    assert parsed.fetched == []
    assert "script" not in parsed.tags
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(parsed.ids) == len(set(parsed.ids))


def test_the_page_shows_every_contender_the_lengths_and_the_slots() -> None:
    text = page()
    for words in (*MAKESPANS, *PLANNERS, "Lengths", "Slots: policy-1", "n2/3"):
        assert words in text
    assert "a &lt;note&gt;" in text
    assert "be warned" in text


def test_the_page_of_a_large_experiment_stays_small() -> None:
    assert len(page(slots=300, timelines=10)) < LIMIT_BYTES


def test_the_page_of_an_experiment_that_kept_no_timeline_has_its_tables() -> None:
    assert "The runs" not in page(timelines=0)


# -- arguments -------------------------------------------------------------------------------------


def test_without_arguments_a_few_policies_run_on_a_shipped_trace(runs: Runs) -> None:
    done = libra()
    assert done.exit_code == 0, done.output
    assert {job.policy for job in runs.jobs} >= {"least-loaded", "libra", "known-lengths"}
    assert {(job.gpus, job.trace.name) for job in runs.jobs} == {(48, "tau2bench_closed_models")}
    assert all(job.layout is not None for job in runs.jobs)
    assert len(list(Path("runs").glob("bench-*/bench.html"))) == 1


@pytest.mark.parametrize(
    ("arguments", "titles"),
    [
        (["--policies", "libra"], [SCHEDULE]),
        (["--planners", "libra"], [PLAN]),
        (["--drift", "2"], [PLAN]),
        (["--seeds", "2"], [SCHEDULE]),
        (["--policies", "libra", "--planners", "libra"], [SCHEDULE, PLAN]),
        (["schedule", "--seeds", "2"], [SCHEDULE]),
        (["--seeds", "2", "schedule"], [SCHEDULE]),
    ],
)
def test_what_runs_is_what_the_options_are_about(
    runs: Runs, arguments: list[str], titles: list[str]
) -> None:
    done = libra(*arguments)
    assert done.exit_code == 0, done.output
    for title in (SCHEDULE, PLAN):
        assert (title in done.output) == (title in titles)


def test_options_before_and_after_the_experiments_name_are_the_same(runs: Runs) -> None:
    for arguments in (["--gpus", "16", "plan", "--drift", "3"], ["plan", "--gpus=16", "--drift=3"]):
        assert libra(*arguments).exit_code == 0
    half = len(runs.jobs) // 2
    assert runs.jobs[:half] == runs.jobs[half:]
    assert {(job.gpus, job.drift.factors) for job in runs.jobs} == {(16, (1.0, 3.0))}


def test_planners_are_compared_with_the_usual_way_on_the_same_workloads(runs: Runs) -> None:
    libra("plan", "--planners", "libra,static-best", "--seeds", "2")
    played = [(job.seed, job.planner, job.policy) for job in runs.jobs]
    usual = ("static-best", "sticky-least-loaded")
    pairs = [("libra", "libra"), ("static-best", "libra"), usual]
    assert played == [(seed, *pair) for seed in range(2) for pair in pairs]


def test_policies_are_compared_on_one_plan_of_equal_servers_past_the_filling(runs: Runs) -> None:
    done = libra("schedule", "--policies", "libra,least-loaded", "--seeds", "1")
    assert done.exit_code == 0, done.output
    (layout,) = {job.layout for job in runs.jobs}
    assert layout is not None
    assert len(layout.servers) == 1
    assert all(job.steps > 2 * (job.bound + 1) for job in runs.jobs)


def test_an_option_the_experiment_does_not_know_is_refused(runs: Runs) -> None:
    done = libra("--planners", "libra", "schedule")
    assert done.exit_code == 2
    assert "schedule has no --planners" in done.output
    assert runs.jobs == []


def test_the_json_is_one_object_with_a_row_a_policy_and_seed(runs: Runs) -> None:
    done = libra("schedule", "--json", "told/rows.json", "--out", "out")
    assert done.exit_code == 0, done.output
    told = json.loads(Path("told/rows.json").read_text())
    assert len(told["rows"]) == len(POLICIES) * 3
    assert {summary["policy"] for summary in told["summary"]} == set(POLICIES)
    assert Path("out/bench.html").exists()


def test_a_part_of_libra_is_left_out_where_that_is_asked_for_by_name(runs: Runs) -> None:
    done = libra("schedule", "--policies", "libra,no moves", "--seeds", "1", "--json", "-")
    assert {row["policy"] for row in json.loads(done.stdout)["rows"]} == {"libra", "no moves"}


def test_json_to_standard_output_is_nothing_but_json(runs: Runs) -> None:
    done = libra("schedule", "--json", "-")
    assert json.loads(done.stdout)["format"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "libra,hedle"], "there is no policy 'hedle'; did you mean 'heddle'?"),
        (["--planners", "dynrl"], "there is no planner 'dynrl'; did you mean 'dynarl'?"),
        (["--profile", "a900-qwen3-14b"], "a800-qwen3-14b"),
        (["--trace", "tau"], "neither a file nor the beginning of one shipped trace"),
        (["--trace", "moatles"], None),
        (["--trace", "none.jsonl"], "none.jsonl: cannot be read"),
        (["--drift", "fast"], "--drift 'fast' is not a list of factors"),
        (["--drift", "1,-2"], "--drift '1,-2' is not a list of factors"),
    ],
)
def test_an_argument_that_means_nothing_is_told_with_what_there_is(
    runs: Runs, arguments: list[str], words: str | None
) -> None:
    done = libra(*arguments)
    if words is None:
        assert done.exit_code == 0, done.output
        return
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert "next:" in done.output
    assert runs.jobs == []


def test_a_broken_line_of_a_trace_is_left_out_and_told_with_file_and_line(runs: Runs) -> None:
    good = '{"task": "t", "turns": [{"prompt_tokens": 9, "gen_tokens": 3}]}\n'
    with gzip.open("some.jsonl.gz", "wt") as file:
        file.write(good + "{broken\n")
    done = libra("--trace", "some.jsonl.gz")
    assert done.exit_code == 0
    assert "some.jsonl.gz:2:" in done.stderr


def test_what_a_trace_lacks_and_too_few_seeds_are_told_in_a_line_each(runs: Runs) -> None:
    done = libra("schedule", "--trace", "kvcache", "--seeds", "1")
    assert done.exit_code == 0
    assert "has no tool outcomes, no rewards, no siblings" in done.stderr
    assert "one seed gives no intervals" in done.stderr


# -- the shipped traces ----------------------------------------------------------------------------


def test_every_shipped_trace_is_read_and_documented() -> None:
    readme = (Path(libra_cli.__file__).parent / "traces/README.md").read_text()
    shipped = shipped_traces()
    assert sum(path.stat().st_size for path in shipped.values()) < 700_000
    for name, path in shipped.items():
        assert f"`{name}`" in readme
        assert load_trace(path).episodes


def test_the_setting_of_a_bench_needs_a_known_name() -> None:
    assert parse_names("policy", " libra, heddle,libra", ["heddle", "libra"]) == (
        "libra",
        "heddle",
    )
    assert parse_names("policy", "", ["heddle", "libra"]) == ("heddle", "libra")


PAGES = ["", "schedule", "plan", "regret", "paper"]
OBJECTS = [*PAGES, "plan --random 2", "run {0}", "staleness", "routing", "--calibrate r.yaml"]


@pytest.mark.parametrize(
    "typed",
    [f"{one} --json {place}" for one in OBJECTS for place in ("{0}", "{0}/file/x.json")]
    + [f"{one} --out {{0}}/file" for one in PAGES],
)
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reports, bench):
        monkeypatch.setattr(module, "working", lambda: pytest.fail("the work has begun"))
    (tmp_path / "file").touch()
    done = libra(*shlex.split(typed.format(tmp_path)))
    assert done.exit_code == ExitCode.WRONG_INPUT, done.output
    assert str(tmp_path) in done.output
    assert "next: ls -ld" in done.output
