"""One run on a host whose GPUs fall off the bus one after the other, until it cannot go on.

The GPUs are nvidia-smi's alone: servers compute nothing and end with theirs, and the trainer
computes on the CPU and is killed when it loses one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.cluster.recipe import with_fake_servers
from tests.fake_gpus import SEES, FakeGpus, python_for_cuda
from tests.integration.test_local_run import recipe_text
from tests.live import LIBRA, QUICK_S, START_S, STEP_S, Live, live, require
from tests.unit.node.test_nvidia import gpu, log

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]
require("torch")

POOLS = ["rollout", "rollout", "train", "train"]


@dataclass
class Seen:
    """What was seen of the run, before each loss and after."""

    live: Live
    had: dict[str, list[str]] = field(default_factory=dict)
    """What processes called their GPUs, by the process, one entry a start."""
    status: int = 0
    """The exit status of the last controller."""

    def note(self, process: str) -> None:
        (pid, *_) = self.live.processes(f"LIBRA_PROCESS={process}")
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        (visible,) = (one for one in environ if one.startswith("CUDA_VISIBLE_DEVICES="))
        self.had.setdefault(process, []).append(visible.partition("=")[2])

    def wait(self, what: str, sql: str) -> None:
        self.live.wait(what, lambda: self.live.query(sql), timeout_s=START_S)

    def until_failed(self, slot: int) -> None:
        sql = f"SELECT 1 FROM slots WHERE slot = 'local/{slot}' AND state = 'failed'"
        self.wait(f"failure of slot {slot}", sql)

    def until_restarted(self, restarts: int) -> None:
        sql = (
            "SELECT 1 FROM slots WHERE slot = 'local/1' AND state = 'serving' "
            f"AND restarts = {restarts}"
        )
        self.wait("restart of slot 1", sql)

    def more_steps(self) -> None:
        ((step,),) = self.live.query("SELECT max(step) FROM steps")
        self.live.wait_step(step + 2, timeout_s=START_S)


def recipe(base: Path, models: Path, gpus: FakeGpus) -> str:
    document = with_fake_servers(yaml.safe_load(recipe_text(base, models)))
    document["run"]["steps"] = 1000
    document["nodes"][0].pop("cores")
    document["nodes"][0] |= {
        "gpus": len(POOLS),
        "slots": len(POOLS),
        "pool": POOLS,
        "python": str(python_for_cuda(base / "cuda")),
        "env": {**SEES, "FAKE_GPUS": "0 1 2 3", "LOST_GPUS": str(gpus.directory)},
    }
    document["model"] |= {"dtype": "float32"}
    document["rollout"] |= {"backend": "tests.fake_gpus:LosingServers"}
    document["training"] |= {"backend": "tests.fake_gpus:OnCpu"}
    del document["evaluation"]
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Seen]:
    """GPU 0 goes with its server, GPU 3 with a rank, then another controller takes over, and GPU 2
    goes with the last rank."""
    base = tmp_path_factory.mktemp("run")
    gpus = FakeGpus(base / "smi", log("{}"), [gpu(number) for number in range(len(POOLS))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{gpus.directory}:{os.environ['PATH']}")
        with live(recipe(base, models, gpus), base / "live", Path.home()) as started:
            seen = Seen(started)
            started.wait_step(1, timeout_s=START_S)
            for process in ("server-0", "server-1", "trainer-0"):
                seen.note(process)
            gpus.lose(0)
            seen.until_failed(0)
            started.kill("server-1", "local")
            seen.until_restarted(1)
            seen.note("server-1")
            gpus.lose(3)
            started.signal_all("trainer-0", "local", signal.SIGKILL)
            seen.until_failed(3)
            seen.more_steps()
            seen.note("trainer-0")
            take_over(started)
            seen.more_steps()
            started.kill("server-1", "local")
            seen.until_restarted(2)
            seen.note("server-1")
            gpus.lose(2)
            started.signal_all("trainer-0", "local", signal.SIGKILL)
            seen.status = started.process.wait(timeout=STEP_S)
            yield seen


def take_over(run: Live) -> None:
    """The controller is killed, and another goes on with what runs."""
    run.process.kill()
    run.process.wait()
    argv = [*LIBRA, "run", str(run.recipe), "--resume", str(run.run_dir)]
    with run.log.open("a") as output:
        run.process = subprocess.Popen(
            argv, cwd=run.recipe.parent, env=os.environ, stdout=output, stderr=output, text=True
        )


def rows(run: Seen, slot: int) -> tuple[str, str, int]:
    sql = f"SELECT state, detail, restarts FROM slots WHERE slot = 'local/{slot}'"
    ((state, detail, restarts),) = run.live.query(sql)
    return state, detail, restarts


def uuid(number: int) -> str:
    return f"GPU-5f0c2a5e-0a1c-7f9b-3a57-00000000000{number}"


def test_processes_are_given_the_same_gpus_whatever_numbers_are_left(run):
    assert run.had["server-0"] == [uuid(0)]
    assert run.had["server-1"] == [uuid(1)] * 3, "number 0 by then, and after a take-over"
    assert run.had["trainer-0"] == [f"{uuid(2)},{uuid(3)}", uuid(2)]


def test_a_slot_whose_gpu_is_lost_is_given_up_without_another_start(run):
    told = f"GPU 0 of local ({uuid(0)}) is lost; on local: nvidia-smi -L"
    state, detail, restarts = rows(run, 0)
    assert detail.startswith(told)
    assert (state, restarts) == ("failed", 0)
    started = [one for _, one in run.live.happened("ServerStarted") if one["slot"] == "local/0"]
    assert len(started) == 1
    (stopped,) = [one for _, one in run.live.happened("ServerStopped") if one.get("lost")]
    assert (stopped["slot"], stopped["lost"]) == (
        "local/0",
        [f"GPU 0 of local ({uuid(0)})"],
    )


def test_the_trainer_went_on_with_one_rank_less(run):
    trained = run.live.query("SELECT trainer_incarnation, max(version) FROM versions GROUP BY 1")
    assert [incarnation for incarnation, _ in trained] == [1, 2]
    notes = [text for (text,) in run.live.query("SELECT text FROM notes WHERE kind = 'slot'")]
    (told,) = [text for text in notes if text.startswith("local/3")]
    assert told.endswith("the trainer goes on without that slot")
    assert f"GPU 3 of local ({uuid(3)})" in told


def test_the_run_ends_when_the_trainer_has_no_gpu_left_and_says_what_to_type(run):
    assert run.status not in (0, -signal.SIGKILL)
    ((state, error),) = run.live.query("SELECT state, error FROM runs")
    assert state == "failed"
    assert error.startswith(f"the trainer failed: GPU 2 of local ({uuid(2)}) is lost; on local: ")
    assert "nvidia-smi -L" in error
    assert error.endswith("libra run RECIPE --resume RUN_DIR")
    assert run.live.processes() == []


def test_status_says_which_gpus_are_lost(run):
    done = run.live.libra("status", str(run.live.run_dir), timeout_s=QUICK_S)
    assert "GPU 0 of local" in " ".join(done.stdout.split()), done.stdout
    told = json.loads(run.live.libra("status", "--json", str(run.live.run_dir)).stdout)
    assert any("is lost" in one["detail"] for one in told["slots"]), told["slots"]
