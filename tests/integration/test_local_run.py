"""``libra run`` on this machine alone: interrupted, resumed, and left behind by its controller."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.live import CHECKOUT, QUICK_S, START_S, live

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("vllm", reason="needs the [cpu] extra")

STEPS = 5
GROUPS = 4


def recipe_text(base: Path) -> str:
    """The quickstart, smaller."""
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "local", "steps": STEPS, "lease_s": 30}
    document["nodes"][0] |= {"workdir": str(base / "work"), "python": sys.executable}
    document["model"]["build"]["warm_steps"] = 60
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 16}]
    document["training"] |= {"groups_per_step": GROUPS, "checkpoint_every": 100}
    return yaml.safe_dump(document)


def test_an_interrupted_run_leaves_nothing_and_goes_on_where_it_was(tmp_path):
    with live(recipe_text(tmp_path), tmp_path, Path.home()) as started:
        started.wait_step(2, timeout_s=START_S)
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(timeout=QUICK_S) == 4, started.told()
        assert started.processes() == []
        ((before, checkpoint),) = started.query(
            "SELECT step, checkpoint FROM steps WHERE checkpoint != ''"
        )
        assert checkpoint
        assert 2 <= before < STEPS
        arguments = ("run", str(started.recipe), "--resume", str(started.run_dir))
        done = started.libra(*arguments, timeout_s=START_S)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        groups = started.groups()
        assert len(groups) == len(set(groups)) == STEPS * GROUPS
        assert started.query("SELECT state FROM runs") == [("finished",)]
        assert started.processes() == []


def test_what_a_killed_controller_leaves_is_stopped_by_libra_stop(tmp_path):
    with live(recipe_text(tmp_path), tmp_path, Path.home()) as started:
        running = "SELECT 1 FROM processes WHERE process = 'server-0' AND state = 'running'"
        started.wait("server process", lambda: started.query(running), timeout_s=START_S)
        started.process.kill()
        started.process.wait()
        assert started.processes() != []
        told = started.libra("status", str(started.run_dir))
        assert "failed" in told.stdout
        done = started.libra("stop", str(started.run_dir))
        assert done.returncode == 0, done.stdout + done.stderr
        assert started.processes() == []
