"""Circumstances are drawn by their number, and libra is told where it fell behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.bench import tournament as bench
from libra_cli.bench.jobs import Job, first_layout_of, run_job
from libra_cli.bench.tournament import BEHIND, Bout, Circumstance, Standing, circumstance, standings
from libra_cli.cli.main import app
from libra_cli.sim.traces import TraceError, load_trace
from tests.sample_bench import row

TRACES = (load_trace("mint"), load_trace("taubench"))


def invented(run: object, jobs: Sequence[Job], progress: Callable[[str], None]) -> Iterator[Any]:
    """Uniform has 100 tokens a second; libra the more the greater the seed, and less when kept."""
    for job in jobs:
        moving = job.planner == "libra" and job.start is None
        tokens = {"uniform": 100.0, "static-best": 95.0}.get(job.planner, 97.5 + 2 * job.seed)
        yield replace(row(), throughput_tok_s=tokens, moves=3 * moving), None


@cache
def drawn_as(number: int) -> Circumstance:
    return circumstance(TRACES, number)


def test_a_number_stands_for_one_circumstance() -> None:
    for number in range(4):
        assert circumstance(TRACES, number) == drawn_as(number)
    drawn = [drawn_as(number) for number in range(30)]
    assert len({str(each) for each in drawn}) > 25
    assert {each.job.bound for each in drawn} == set(bench.BOUNDS)
    assert {each.rule for each in drawn} == set(bench.DRAWN_RULES)
    assert all(each.job.profile.training.transfer_s > 0 for each in drawn)


def test_traces_that_no_run_can_play_are_refused_and_not_drawn_for_ever() -> None:
    mint = TRACES[0]
    endless = tuple(replace(one, prompt=1_000_000) for one in mint.episodes[:4])
    with pytest.raises(TraceError, match="every prompt has"):
        circumstance([replace(mint, episodes=endless)], 0)


def test_every_contender_holds_the_longest_trajectory() -> None:
    for number in range(10):
        for job in bench._contenders(drawn_as(number).job):
            layout = job.start or first_layout_of(job, job.workload)
            for bucket in layout.buckets:
                assert job.profile.servers[bucket.tensor_parallel].kv_tokens >= job.max_len
            if job.planner == "uniform":
                holds = job.profile.training.longest_context(layout.training_gpus)
                assert holds >= job.max_len


def test_a_circumstance_is_played_four_times_with_the_same_groups() -> None:
    drawn = circumstance(TRACES[1:], 0).job
    jobs = bench._contenders(replace(drawn, steps=2, groups_per_step=2))
    assert len({tuple(next(job.groups()) for _ in range(2)) for job in jobs}) == 1
    libra, half, kept, uniform = (run_job(job)[0] for job in jobs)
    assert {each.planner for each in (libra, half)} == {"libra"}
    assert [kept.moves, uniform.moves] == [0, 0]
    assert len({each.throughput_tok_s for each in (kept, uniform)}) == 2


def test_standings_count_those_that_fell_behind() -> None:
    drawn = drawn_as(0)
    bouts = [Bout(drawn, libra, 100.0, 100.0, 100.0, 0) for libra in (90.0, 99.5, 120.0)]
    standing = next(iter(standings(bouts)))
    assert standing == Standing.among("all", bouts)
    assert standing.behind == 1
    assert standing.worst == pytest.approx(-0.1)
    assert standing.over_uniform == pytest.approx(0.095 / 3)
    assert [one.number for one in standings(bouts)] == [3] * 4
    assert BEHIND == 0.01


def test_the_command_tells_where_libra_came_out_worst(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "simulated", invented)
    told = tmp_path / "told.json"
    arguments = ["--trace", "mint", "--trace", "taubench", "--random", "3", "--json", str(told)]
    done = CliRunner().invoke(app, ["bench", "plan", *arguments], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    found = json.loads(told.read_text())["tournament"]
    uniform = [round(one["over_uniform"], 3) for one in found["circumstances"]]
    assert uniform == [-0.025, -0.005, 0.015]
    assert found["standings"][0]["behind"] == 1
    assert "bench plan --random 1 --first" in done.output
    again = ["--trace", "mint", "--trace", "taubench", "--random", "1", "--first", "2"]
    done = CliRunner().invoke(app, ["bench", "plan", *again, "--json", str(told)])
    assert json.loads(told.read_text())["tournament"]["circumstances"] == found["circumstances"][2:]


@pytest.mark.parametrize("flag", ["--bound 1", "--rule hold", "--gpus 16", "--drift none"])
@pytest.mark.parametrize("order", ["bench plan --random 2 {}", "bench {} plan --random 2"])
def test_what_is_drawn_cannot_be_asked_for(flag: str, order: str) -> None:
    done = CliRunner().invoke(app, order.format(flag).split())
    assert done.exit_code == 2
    assert f"--random draws what {flag.split()[0]} says" in done.output
