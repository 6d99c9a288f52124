"""``libra run`` on this machine alone: a server is killed, the terminal closed, the run stopped,
resumed without one from the checkpoint before a damaged one, attached to, and ends.

One run carries most claims, because starting vLLM is what costs the time. Another is left behind by
its controller.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from libra_cli.api import load_run
from tests.cluster.recipe import with_fake_servers
from tests.live import CHECKOUT, QUICK_S, START_S, STEP_S, Live, live, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
]
require("vllm")

STEPS = 24
"""With fewer, the tasks of the first and the last five steps differ by as much as is learned."""
GROUPS = 8
TASKS, SAMPLES = 6, 2
"""Of an evaluation."""
INTERRUPTED = 4
"""The exit status after Ctrl-C."""
SLOT = "local/0"


def recipe_text(base: Path, models: Path) -> str:
    """The quickstart, smaller."""
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "local", "steps": STEPS, "lease_s": 30}
    work = base / "work"
    work.mkdir(parents=True)
    (work / "models").symlink_to(models)
    document["nodes"][0] |= {"workdir": str(work), "python": sys.executable, "cores": 1}
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 32}]
    document["training"] |= {"groups_per_step": GROUPS, "checkpoint_every": 100}
    document["evaluation"] = {"num_tasks": TASKS, "samples": SAMPLES, "every": 2}
    return yaml.safe_dump(document)


@dataclass(frozen=True)
class Interrupted:
    """A run that went on after an interruption, and what was seen of it in between."""

    live: Live
    status: int
    """The exit status of the interrupted controller."""
    cores: dict[str, set[int]]
    """Cores that every thread of a slot's processes may use, by the name of the process."""
    left: list[int]
    """Processes that the interrupted controller left."""
    restarts: list[tuple[int]]
    """Of the slot whose server was killed, before the interruption."""
    checkpoint: int
    """The step of the interruption's checkpoint."""
    detached: subprocess.CompletedProcess[str]
    """What started the controller that went on, and left it."""
    resumed: subprocess.CompletedProcess[str]
    """What showed it until its end."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Interrupted]:
    """Its server is killed and its terminal closed, its controller interrupted, and resumed until
    its last step."""
    base = tmp_path_factory.mktemp("run")
    with live(recipe_text(base, models), base, Path.home(), in_terminal=True) as started:
        started.wait_step(1, timeout_s=2 * START_S)  # the model is built first
        cores = {name: cores_of(started, name) for name in ("server-0", "trainer-0")}
        started.kill("server-0", "local")
        started.hang_up()
        started.wait_step(4, timeout_s=START_S)
        started.process.send_signal(signal.SIGINT)
        status = started.process.wait(timeout=QUICK_S)
        left = started.processes()
        restarts = started.query(f"SELECT restarts FROM slots WHERE slot = '{SLOT}'")
        ((checkpoint,),) = started.query("SELECT step FROM steps WHERE checkpoint != ''")
        damage(base / "work/runs" / started.run_dir.name / "local/checkpoints", checkpoint)
        arguments = ("run", str(started.recipe), "--resume", str(started.run_dir), "--detach")
        detached = started.libra(*arguments, timeout_s=START_S)
        resumed = started.libra("attach", str(started.run_dir), timeout_s=START_S + STEP_S)
        yield Interrupted(started, status, cores, left, restarts, checkpoint, detached, resumed)


def cores_of(started: Live, process: str) -> set[int]:
    """The cores of all threads of a process of the run and of its children."""
    pids = started.processes(f"LIBRA_PROCESS={process}")
    threads = [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    assert threads, f"{process} is not there"
    return set[int]().union(*map(os.sched_getaffinity, threads))


def damage(checkpoints: Path, step: int) -> None:
    """A newer checkpoint than that of a step, of which a part is not as it was written."""
    newer = checkpoints / f"step-{step + 1:06d}-e1"
    shutil.copytree(checkpoints / f"step-{step:06d}-e1", newer)
    with next(newer.glob("*.distcp")).open("r+b") as file:
        file.write(b"\xff" * 8)


def test_an_interrupted_run_ends_soon_with_a_checkpoint_and_leaves_nothing(run):
    assert run.status == INTERRUPTED, run.live.told()
    assert run.left == []
    assert 4 <= run.checkpoint < STEPS


def test_slots_stay_on_the_cores_that_they_own(run):
    own = sorted(os.sched_getaffinity(0))
    each = [{own[0]}, {own[1]}] if len(own) > 1 else [set(own)] * 2
    assert [run.cores["server-0"], run.cores["trainer-0"]] == each


def test_a_run_whose_terminal_was_closed_went_on_and_said_so_in_a_file(run):
    said = (run.live.run_dir / "console.log").read_text()
    steps = [line.split()[2] for line in said.splitlines() if line[10:].startswith("step ")]
    assert [f"{step}/{STEPS}" for step in range(3, STEPS + 1)] == steps[-(STEPS - 2) :], said


def test_a_detached_run_is_left_once_its_hosts_are_ready(run):
    assert run.detached.returncode == 0, run.detached.stdout + run.detached.stderr
    assert f"libra attach {run.live.run_dir}" in run.detached.stdout


def test_a_damaged_checkpoint_is_passed_over_and_told(run):
    said = (run.live.run_dir / "console.log").read_text()
    passed = f"checkpoint step-{run.checkpoint + 1:06d}-e1 cannot be used: "
    assert passed in said
    assert f"going on from step-{run.checkpoint:06d}-e1" in said
    assert passed in run.resumed.stdout, "who attaches sees what was told"


def test_a_resumed_run_goes_on_to_its_last_step(run):
    assert run.resumed.returncode == 0, run.resumed.stdout[-3000:] + run.resumed.stderr[-3000:]
    assert run.live.query("SELECT state, error FROM runs") == [("finished", "")]
    steps = [step for (step,) in run.live.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, STEPS + 1))
    assert run.live.processes() == []


def test_the_resumed_trainer_begins_where_the_checkpoint_was_taken(run):
    incarnations = run.live.query(
        "SELECT trainer_incarnation, min(version), max(version) FROM versions GROUP BY 1 ORDER BY 1"
    )
    assert incarnations == [(1, 0, run.checkpoint), (2, run.checkpoint, STEPS)]


def test_the_run_leaves_its_model_and_a_checkpoint_can_be_exported_again(run, tmp_path):
    last, *_ = run.live.query("SELECT step, path FROM exports ORDER BY step DESC")
    assert last[0] == STEPS
    made = Path(last[1])
    card = (made / "README.md").read_text()
    assert f"| steps | {STEPS} of {STEPS} |" in card
    again = run.live.libra(
        "export", str(run.live.run_dir), "--to", str(tmp_path / "model"), timeout_s=START_S
    )
    assert again.returncode == 0, again.stderr
    weights = [
        (directory / "model.safetensors").read_bytes() for directory in (made, tmp_path / "model")
    ]
    assert weights[0] == weights[1]


def test_no_group_is_trained_twice(run):
    assert run.live.groups_of_steps() == [GROUPS] * STEPS


def test_a_failure_is_recorded_and_never_scored(run):
    scored = "SELECT 1 FROM trajectories WHERE state = 'failed' AND reward IS NOT NULL"
    assert run.live.query(scored) == []
    unscored = "SELECT 1 FROM groups WHERE state = 'trained' AND reward IS NULL"
    assert run.live.query(unscored) == []


def test_the_killed_server_came_back_and_proved_every_version_it_served(run):
    assert run.restarts == [(1,)]
    sql = "SELECT count(*), sum(verified), max(gap), max(version) FROM syncs"
    ((count, verified, gap, newest),) = run.live.query(sql)
    assert newest == STEPS
    assert verified >= STEPS
    assert gap < 1e-3
    assert count - verified <= 3, "only syncs that a fault cut off may have failed"


def test_the_reward_rises_all_the_same(run):
    rewards = [reward for (reward,) in run.live.query("SELECT reward FROM steps ORDER BY step")]
    assert sum(rewards[-5:]) > sum(rewards[:5]), rewards


def test_rollout_and_trainer_agree_on_log_probabilities(run):
    gaps = run.live.query("SELECT logprob_gap FROM steps WHERE logprob_gap IS NOT NULL")
    assert gaps
    assert max(gap for (gap,) in gaps) < 1e-3


def test_status_tells_the_documented_object(run):
    done = run.live.libra("status", "--json", str(run.live.run_dir))
    told = json.loads(done.stdout)
    assert told["run"]["state"] == "finished"
    assert told["step"] == told["weight_version"] == STEPS
    assert set(told["reward"]) >= {"first", "last"}
    assert {server["verified"] for server in told["servers"]} == {True}
    assert {server["version"] for server in told["servers"]} == {STEPS}
    assert told["trajectories"]["in_flight"] == 0
    assert told["moves"] == []


def test_the_report_is_one_offline_file(run):
    text = (run.live.run_dir / "report.html").read_text()
    assert "<svg" in text
    # What an error says may name an address; nothing may be fetched from one.
    assert not re.search(r"""(src|href)=["']https?://|url\(["']?https?://|@import""", text)


def test_every_step_is_a_line_of_metrics(run):
    lines = (run.live.run_dir / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    rewards = {row["step"]: row["reward/mean"] for row in told if "reward/mean" in row}
    steps = load_run(run.live.run_dir).steps
    assert rewards == {step.step: step.metrics["reward/mean"] for step in steps}


def test_every_evaluation_that_finished_is_a_line_of_metrics_and_all_did_but_the_interrupted(run):
    evaluations = load_run(run.live.run_dir).evaluations
    done = {one.step: one for one in evaluations if one.state == "finished"}
    cut = [one for one in evaluations if one.state != "finished"]
    assert {one.state for one in cut} <= {"cut"}
    assert len(cut) <= 1, "there was one interruption"
    assert {0, STEPS} <= done.keys()
    assert len(done) == len(evaluations) - len(cut), "a step was evaluated twice"
    lines = (run.live.run_dir / "metrics.jsonl").read_text().splitlines()
    told = {row["step"]: row for row in map(json.loads, lines) if "eval/held-out/pass@1" in row}
    assert told.keys() == done.keys()
    for step, one in done.items():
        assert (one.tasks, one.samples, one.failed) == (TASKS, SAMPLES, 0)
        assert told[step]["eval/held-out/pass@1"] == one.metrics["pass@1"]
    assert 0 < done[STEPS].metrics["pass@1"] <= 1
    status = json.loads(run.live.libra("status", "--json", str(run.live.run_dir)).stdout)
    (part,) = status["evaluations"]
    assert (part["step"], part["playing"]) == (STEPS, None)
    assert "Evaluation held-out" in (run.live.run_dir / "report.html").read_text()


def test_what_was_said_can_be_read_afterwards(run):
    loaded = load_run(run.live.run_dir)
    trained = next(one for one in loaded.trajectories if one.step == STEPS)
    assert "<|im_start|>" in loaded.text(trained)


def test_the_logs_of_a_host_can_be_read_afterwards(run):
    about = ("local", "trainer-0", "--run", str(run.live.run_dir), "-n", "5")
    done = run.live.libra("logs", *about)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_token_of_the_run_is_nowhere_to_be_read(run):
    work = run.live.run_dir.parents[1] / "work"
    tokens = list(work.rglob("token"))
    for token in tokens:
        assert token.stat().st_mode & 0o077 == 0
    secrets = {token.read_text().strip() for token in tokens}
    kept = run.live.run_dir / "secrets.json"
    assert kept.stat().st_mode & 0o077 == 0
    told = [run.live.log, *run.live.run_dir.glob("*.*"), *work.rglob("logs/*.log")]
    for path in set(told) - {kept}:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path


def test_what_a_killed_controller_leaves_is_stopped_by_libra_stop(tmp_path, models):
    recipe = with_fake_servers(yaml.safe_load(recipe_text(tmp_path, models)))
    with live(yaml.safe_dump(recipe), tmp_path, Path.home()) as started:
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
