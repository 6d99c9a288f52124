"""Every experiment of ``libra bench`` for real, on a shipped trace, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libra_cli.core.planning.replanning import PLANNERS
from libra_cli.core.scheduling.scheduler import POLICIES
from libra_cli.sim.ablations import ABLATIONS

CHECKOUT = Path(__file__).parents[2]
LIBRA = [sys.executable, "-c", "from libra_cli.cli import main; main()"]
SMALL = ("--trace", "tau2", "--gpus", "16", "--seeds", "1")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def bench(tmp_path: Path, experiment: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows it wrote, when it has also drawn its report."""
    told = tmp_path / "told.json"
    done = subprocess.run(
        [*LIBRA, "bench", experiment, *arguments, *SMALL, "--out", tmp_path, "--json", told],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "<svg" in (tmp_path / "bench.html").read_text()
    rows: list[dict[str, Any]] = json.loads(told.read_text())["rows"]
    assert all(row["throughput_tok_s"] > 0 for row in rows)
    return rows


def test_every_policy_plays_the_same_work(tmp_path: Path) -> None:
    rows = bench(tmp_path, "schedule")
    assert {row["policy"] for row in rows} >= {*POLICIES, "clairvoyant"}


def test_every_planner_goes_through_a_drift_and_some_move(tmp_path: Path) -> None:
    rows = bench(tmp_path, "plan", "--drift", "1,6")
    moves = {row["planner"]: row["moves"] for row in rows if row["policy"] == "libra"}
    assert moves.keys() == {*PLANNERS}
    assert moves["libra"] > 0
    assert moves["greedy"] > 0
    assert moves["uniform"] == moves["static-best"] == moves["colocated"] == 0


def test_every_part_of_the_scheduler_can_be_left_out(tmp_path: Path) -> None:
    rows = bench(tmp_path, "ablation")
    assert {row["policy"] for row in rows} >= {*ABLATIONS}
