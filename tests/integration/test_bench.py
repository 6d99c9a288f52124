"""Every experiment of ``libra bench`` for real, on a shipped trace, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from libra_cli.bench.contenders import ABLATIONS
from libra_cli.core.planning.baselines import PLANNERS
from libra_cli.core.scheduling.policy import POLICIES

CHECKOUT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "dumb"}
# A quarter of a real experiment's groups, and fewer steps. The processes that simulate are forks,
# and inherit that.
SHORT = (
    "from functools import partial; from libra_cli.bench import config, experiments, jobs; "
    "config.Job = partial(jobs.Job, groups_per_step=8); "
    "experiments.STEPS, experiments.LONG_STEPS = 3, 12; "
)
LIBRA = [sys.executable, "-c", f"{SHORT} from libra_cli.cli.main import main; main()"]
ABLATION = [
    *LIBRA[:2],
    f"{SHORT} import typer; from tests.research.ablation import main; typer.run(main)",
]
SMALL = ("--trace", "tau2", "--gpus", "16", "--seeds", "1")
# Of tau2 the first plan of so few groups is right to the end, however lengths grow.
MOVING = ("--trace", "moatless", *SMALL[2:])

pytestmark = [pytest.mark.integration, pytest.mark.timeout(660)]


def bench(
    tmp_path: Path,
    *arguments: str,
    program: Sequence[str] = LIBRA,
    size: Sequence[str] = SMALL,
) -> list[dict[str, Any]]:
    """The rows it wrote, when it has also drawn its report."""
    told = tmp_path / "told.json"
    done = subprocess.run(
        [*program, *arguments, *size, "--out", tmp_path, "--json", told],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "<svg" in (tmp_path / "bench.html").read_text()
    rows: list[dict[str, Any]] = json.loads(told.read_text())["rows"]
    assert all(row["throughput_tok_s"] > 0 for row in rows)
    return rows


def test_every_policy_plays_the_same_work(tmp_path: Path) -> None:
    rows = bench(tmp_path, "bench", "schedule")
    assert {row["policy"] for row in rows} >= {*POLICIES.shipped, "known-lengths"}


def test_every_planner_goes_through_a_drift_and_some_move(tmp_path: Path) -> None:
    rows = bench(tmp_path, "bench", "plan", "--drift", "1,6", size=MOVING)
    moves = {row["planner"]: row["moves"] for row in rows if row["policy"] == "libra"}
    assert moves.keys() == {*PLANNERS}
    assert moves["libra"] > 0
    assert moves["greedy"] > 0
    assert moves["uniform"] == moves["static-best"] == moves["colocated"] == 0


def test_every_part_of_the_scheduler_can_be_left_out(tmp_path: Path) -> None:
    rows = bench(tmp_path, program=ABLATION)
    assert {row["policy"] for row in rows} >= {*ABLATIONS}


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def within(seconds: float, condition: Callable[[], object]) -> bool:
    give_up = monotonic() + seconds
    while not condition() and monotonic() < give_up:
        sleep(0.1)
    return bool(condition())


def test_killed_outright_it_leaves_no_process(tmp_path: Path) -> None:
    arguments = ("bench", "schedule", *SMALL, "--out", tmp_path)
    with subprocess.Popen([*LIBRA, *arguments], cwd=tmp_path, env=ENV) as process:
        try:
            assert within(60, lambda: children(process.pid))
            simulating = children(process.pid)
        finally:
            process.kill()
    assert within(30, lambda: not any(Path(f"/proc/{pid}").exists() for pid in simulating))
