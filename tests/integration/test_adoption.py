"""A controller is killed outright in the middle of a run and of an evaluation; another goes on with
all that runs.

The servers compute nothing, which no claim here is about; every night they are vLLM's.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra_cli.core.types import EVALUATION_GROUPS
from tests.cluster.recipe import with_fake_servers
from tests.live import BACKENDS, CHECKOUT, LIBRA, QUICK_S, START_S, STEP_S, Live, live, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]
require("vllm")

STEPS, GROUPS = 14, 4
TASKS, SAMPLES = 8, 2
"""Of an evaluation."""
KILLED_AFTER = (2, 5)
"""Steps after which a controller is killed: the first, and the one that went on."""


def recipe_text(base: Path, models: Path, backend: str) -> str:
    """The quickstart, smaller."""
    (base / "work").mkdir()
    (base / "work/models").symlink_to(models)
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "killed", "steps": STEPS, "lease_s": 60}
    document["nodes"][0] |= {"workdir": str(base / "work"), "python": sys.executable}
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 32}]
    document["training"] |= {"groups_per_step": GROUPS, "checkpoint_every": 4}
    # With one after each step nearly always one is in play.
    document["evaluation"] = {"num_tasks": TASKS, "samples": SAMPLES, "every": 1}
    return yaml.safe_dump(with_fake_servers(document) if backend == "fake" else document)


@dataclass
class Adopted:
    """A run whose controllers were killed, and what was seen of it."""

    live: Live
    left: list[list[int]] = field(default_factory=list)
    """Its processes after each kill, and when the next controller had gone on for a step."""
    seconds: list[float] = field(default_factory=list)
    """From ``--resume`` to the next step in the journal."""
    evaluating: list[int] = field(default_factory=list)
    """The evaluation that was in play at each kill."""
    refused: list[str] = field(default_factory=list)
    """What a second controller was told, while the first that went on lived."""


def killed(run: Adopted, step: int) -> None:
    """Kill the controller after that step, in the middle of an evaluation."""
    run.live.wait_step(step, timeout_s=START_S)
    sql = "SELECT evaluation FROM evaluations WHERE state = 'running' AND finished > 0"
    playing = run.live.wait("evaluation", lambda: run.live.query(sql), timeout_s=STEP_S)
    run.evaluating.append(playing[0][0])
    run.live.process.send_signal(signal.SIGKILL)
    run.live.process.wait(QUICK_S)
    run.left.append(run.live.processes())


def resumed(run: Adopted) -> None:
    """Start the next controller and wait for its first step."""
    ((last,),) = run.live.query("SELECT max(step) FROM steps")
    arguments = ["run", str(run.live.recipe), "--resume", str(run.live.run_dir)]
    with run.live.log.open("a") as output:
        began = time.monotonic()
        run.live.process = subprocess.Popen(
            [*LIBRA, *arguments],
            cwd=run.live.recipe.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    run.live.wait_step(last + 1, timeout_s=STEP_S)
    run.seconds.append(time.monotonic() - began)


@pytest.fixture(scope="module", params=BACKENDS)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Adopted]:
    base = tmp_path_factory.mktemp("run")
    with live(recipe_text(base, models, request.param), base, Path.home()) as started:
        seen = Adopted(started)
        started.wait_step(1, timeout_s=2 * START_S)  # the model is built first
        for step in KILLED_AFTER:
            killed(seen, step)
            resumed(seen)
            seen.left.append(started.processes())
            again = started.libra("run", str(started.recipe), "--resume", str(started.run_dir))
            seen.refused.append(again.stderr + again.stdout)
        assert started.process.wait(START_S) == 0, started.told()
        yield seen


def test_the_run_finishes_and_leaves_nothing(run):
    assert run.live.query("SELECT state, error FROM runs") == [("finished", "")]
    assert run.live.processes() == []
    assert not (run.live.run_dir / "events.log").exists()


def test_no_process_is_restarted(run):
    first, still, then, at_last = run.left
    assert first
    assert set(still) == set(first)
    assert set(then) == set(at_last) == set(first)
    versions = "SELECT DISTINCT trainer_incarnation FROM versions"
    assert run.live.query(versions) == [(1,)]
    assert {restarts for (restarts,) in run.live.query("SELECT restarts FROM slots")} == {0}


def test_the_next_step_comes_soon(run):
    assert max(run.seconds) < 30, run.seconds


def test_nothing_is_trained_twice_and_nothing_is_lost(run):
    assert run.live.groups_of_steps() == [GROUPS] * STEPS
    steps = [step for (step,) in run.live.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, STEPS + 1))
    broken = "SELECT 1 FROM trajectories WHERE state = 'failed'"
    assert run.live.query(broken) == []


def test_an_evaluation_goes_on_where_it_was(run):
    rows = run.live.query("SELECT evaluation, step, state, finished, failed FROM evaluations")
    ended = {number: rest for number, *rest in rows}
    for number in run.evaluating:
        assert ended[number][1:] == ["finished", TASKS * SAMPLES, 0]
    assert {state for _, state, *_ in ended.values()} == {"finished"}
    assert max(step for step, *_ in ended.values()) == STEPS
    trajectories = f"SELECT count(*) FROM trajectories WHERE group_id >= {EVALUATION_GROUPS}"
    assert run.live.query(f"{trajectories} AND state = 'finished'") == [
        (TASKS * SAMPLES * len(ended),)
    ]


def test_nothing_evaluated_is_trained_on(run):
    for table in ("credits", "groups"):
        sql = f"SELECT count(*) FROM {table} WHERE group_id >= {EVALUATION_GROUPS}"
        assert run.live.query(sql) == [(0,)]


def test_every_event_is_in_the_journal_once(run):
    def events_of(kind: str) -> list[tuple[Any, ...]]:
        return [(at, json.dumps(said)) for at, said in run.live.happened(kind)]

    for kind in ("StepDone", "EpisodeStarted", "TurnGenerated"):
        found = events_of(kind)
        assert len(found) == len(set(found))
    assert len(events_of("StepDone")) == STEPS


def test_a_second_controller_is_refused_while_one_lives(run):
    assert all("still running" in said for said in run.refused), run.refused
