"""What the measuring commands print and write: ``python -m tests.research.X``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from libra_cli.bench import experiments
from libra_cli.bench.contenders import ABLATIONS
from libra_cli.cli.bench import QUICK
from tests.research import ablation, sensitivities, speed
from tests.research.fidelity import __main__ as fidelity
from tests.research.peers import __main__ as peers
from tests.research.speed import SpeedRow
from tests.sample_bench import Runs


def run(main: Callable[..., None], *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})


# -- speed -----------------------------------------------------------------------------------------


def test_speeds_are_shown_beside_the_wanted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented speeds: measuring real ones takes most of a minute."""
    rows = [SpeedRow("plan", 0.2, "s", 0.1), SpeedRow("run", 3.0, "s")]
    monkeypatch.setattr(speed, "speed", lambda progress: rows)
    text = run(speed.main).output
    assert "≤ 0.1 s ✗" in text
    assert "✓" not in text
    told = json.loads(run(speed.main, "--json", "-").stdout)["speed"]
    assert [row["reached"] for row in told] == [False, None]


def test_a_speed_is_judged_from_the_right_side() -> None:
    assert SpeedRow("plan", 0.09, "s", 0.1).reached
    assert SpeedRow("decisions", 9.0, "/s", 10.0, at_most=False).reached is False
    assert SpeedRow("told", 9.0, "/s").reached is None


# -- recorded runs ---------------------------------------------------------------------------------


def recorded(directory: Path, *, model: str = "Qwen/Qwen3-14B", tensor_parallel: int = 1) -> Path:
    """Ten requests that a server worked off one after the other."""
    engine = {"tensor_parallel_size": tensor_parallel, "max_num_seqs": 8}
    about = {"model": model, "engine_kwargs": {**engine, "max_num_batched_tokens": 2048}}
    (directory / "some_meta.json").write_text(json.dumps(about))
    lines = [
        {
            "input_toks": 100,
            "output_toks": 50,
            "queued_ts": at,
            "scheduled_ts": at,
            "first_token_ts": at + 0.05,
            "last_token_ts": at + 1.0 + at / 100,
        }
        for at in map(float, range(10))
    ]
    path = directory / "some_requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recorded_run_is_compared_with_a_profile(tmp_path: Path) -> None:
    requests = str(recorded(tmp_path))
    done = run(fidelity.main, "--run", requests)
    assert done.exit_code == 0, done.output
    assert "10 requests" in done.output
    assert "mean latency" in done.output
    told = json.loads(run(fidelity.main, "--run", requests, "--json", "-").stdout)
    assert told["fidelity"]["requests"] == 10


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"model": "meta-llama/Llama-3.1-8B"}, "is of Qwen3-14B, and the run of Llama-3.1-8B"),
        ({"tensor_parallel": 64}, "has no server of 64 GPUs"),
    ],
)
def test_a_profile_that_is_not_of_the_run_is_refused(
    tmp_path: Path, made: dict[str, Any], words: str
) -> None:
    done = run(fidelity.main, "--run", str(recorded(tmp_path, **made)))
    assert done.exit_code == 2
    assert words in done.output
    assert "next:" in done.output


def test_a_run_without_its_description_asks_for_it(tmp_path: Path) -> None:
    requests = recorded(tmp_path)
    requests.with_name("some_meta.json").unlink()
    assert "--meta" in run(fidelity.main, "--run", str(requests)).output
    assert "no such file" in run(fidelity.main, "--run", str(tmp_path / "none.jsonl")).output


# -- experiments on libra's parts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main", "title", "policies"),
    [
        (ablation.main, "libra, part by part", {"libra", *ABLATIONS}),
        (sensitivities.main, "where costs are others", {*QUICK.split(",")}),
    ],
)
def test_parts_and_costs_are_compared_on_a_shipped_trace(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    main: Callable[..., None],
    title: str,
    policies: set[str],
) -> None:
    runs = Runs()
    monkeypatch.setattr(experiments, "run_jobs", runs)
    done = run(main, "--seeds", "2", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert title in done.output
    assert {job.policy for job in runs.jobs} >= policies
    assert (tmp_path / "bench.html").exists()


def test_an_ablation_has_one_drift() -> None:
    done = run(ablation.main, "--drift", "1,4 4,1")
    assert done.exit_code == 2
    assert "an ablation has one drift" in done.output


# -- peers -----------------------------------------------------------------------------------------


def test_latencies_that_are_no_numbers_are_refused() -> None:
    done = run(peers.main, "recipes/quickstart.yaml", "--latencies", "fast")
    assert done.exit_code == 1, done.output
    assert "'fast' is no list of seconds" in done.output
