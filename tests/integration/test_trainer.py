"""The trainer as it is run: real ``accelerate launch``, real gloo worlds, driven over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.node.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.recipe import TrainingSpec  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
TOKEN = "of-this-run"
START_S = 120.0
STEP_S = 60.0
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


@dataclass(frozen=True)
class Trainer:
    """A running trainer."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    versions: Path
    marker: str

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=STEP_S)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def wait_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                _, health = self.ask("GET", "/health")
            except OSError:
                health = {"state": "starting"}
            if health["state"] != "starting":
                return health
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def step(self, number: int, ledger: Mapping[str, Any] | None = None) -> dict[str, Any]:
        checkpoint = None if ledger is None else {"ledger": ledger}
        message = {"step": number, "checkpoint": checkpoint, "trajectories": batch(number)}
        assert self.ask("POST", "/train", msgpack.packb(message))[0] == 202
        _, result = self.ask("GET", f"/train/{number}?wait_s={STEP_S - 5}")
        assert result["state"] == "done", result
        return result

    def checkpoint(self, number: int, ledger: Mapping[str, Any]) -> Path:
        """Take a step and wait for the checkpoint that was asked for with it."""
        self.step(number, ledger)
        deadline = time.monotonic() + STEP_S
        while time.monotonic() < deadline:
            if path := self.ask("GET", f"/train/{number}")[1]["checkpoint"]:
                return Path(path)
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self) -> int:
        self.ask("POST", "/stop")
        return self.process.wait(60)

    def parameters(self, version: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        (directory,) = self.versions.glob(f"v{version:06d}-e*")
        tensors: dict[str, Any] = load_file(directory / "model-00000.safetensors")
        return tensors


def batch(step: int) -> list[dict[str, Any]]:
    """Four groups of four, the same for every trainer; lengths differ, so cuts do."""
    rng = np.random.default_rng([7, step])
    made = []
    for group in range(4):
        for member in range(4):
            length = int(rng.integers(12, 60))
            mask = (rng.random(length) < 0.5).astype("<i1")
            mask[0], mask[-1] = 0, 1
            logprobs = np.where(mask, -5.5 - 0.3 * rng.random(length), 0).astype("<f4")
            made.append(
                {
                    "group": group,
                    "member": member,
                    "token_ids": rng.integers(3, 268, length).astype("<i4").tobytes(),
                    "logprobs": logprobs.tobytes(),
                    "loss_mask": mask.tobytes(),
                    "reward": float(rng.random() < 0.5),
                    "fresh": member % 2,
                    "staleness": 0,
                }
            )
    return made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def trainer(
    directory: Path,
    model_dir: Path,
    *,
    processes: int = 1,
    world_size: int | None = None,
    resume: Path | None = None,
    epoch: int = 0,
    **training: Any,
) -> Iterator[Trainer]:
    """Start one; whatever happens, none of its processes is left afterwards."""
    directory.mkdir()
    marker = str(directory)
    (directory / "token").write_text(TOKEN)
    port, master = free_port(), free_port()
    spec = TrainingSpec(
        learning_rate=1e-3, warmup_steps=3, micro_batch_tokens=200, keep_checkpoints=2, **training
    )
    config = {
        "run_id": "run",
        "model_dir": str(model_dir),
        "weights_dir": str(directory / "weights"),
        "checkpoint_dir": str(directory / "checkpoints"),
        "port": port,
        "world_size": world_size or processes,
        "trainer_epoch": epoch,
        "seed": 0,
        "dtype": "float32",
        "temperature": 0.9,
        "training": spec.model_dump(mode="json"),
        "group_size": 4,
        "max_len": 128,
        "resume": None if resume is None else str(resume),
        "keep_versions": 10,
    }
    (directory / "config.json").write_text(json.dumps(config))
    world = ["--num_machines", "1", "--num_processes", str(processes)]
    if processes > 1:
        world += ["--multi_gpu", "--machine_rank", "0"]
        world += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(master)]
    argv = [sys.executable, "-m", "accelerate.commands.launch", *world]
    argv += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "libra_cli.node.train"]
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "LIBRA_RUN": marker,
        "LIBRA_TOKEN_FILE": str(directory / "token"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PACKAGE_ROOT),
    }
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, str(directory / "config.json")],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Trainer(port, process, log, directory / "weights" / "run", marker)
    finally:
        for pid in processes_marked(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@dataclass(frozen=True)
class Reference:
    """Four steps by one process, with a checkpoint after the second."""

    initial: dict[str, Any]
    last: dict[str, Any]
    results: list[dict[str, Any]]
    checkpoint: Path


@pytest.fixture(scope="module")
def reference(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    with trainer(tmp_path_factory.mktemp("one") / "run", model_dir) as one:
        assert one.wait_ready()["world_size"] == 1
        first = one.step(1)
        path = one.checkpoint(2, {"position": [2, "groups"]})
        results = [first, one.step(3), one.step(4)]
        initial, last = one.parameters(0), one.parameters(4)
        assert one.stop() == 0
    return Reference(initial, last, results, path)


def test_a_step_is_measured_and_moves_the_policy(reference: Reference):
    metrics = reference.results[0]["metrics"]
    assert metrics["learning_rate"] == pytest.approx(1e-3 / 3)
    assert metrics["generated_tokens"] > metrics["logprob_gap_tokens"] > 0
    assert metrics["kl"] is None
    assert 0 < metrics["grad_norm"] < 100
    assert 0 < metrics["entropy"] < np.log(268)
    assert metrics["trainer_s"] > metrics["publish_s"] > 0
    assert reference.results[0]["version"]["name"] == "v000001-e0"
    assert largest_difference(reference.initial, reference.last) > 1e-3


def test_resuming_gives_exactly_what_going_on_would_have(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    assert json.loads((reference.checkpoint / "ledger.json").read_text()) == {
        "position": [2, "groups"]
    }
    again = tmp_path / "again"
    with trainer(again, model_dir, resume=reference.checkpoint, epoch=1) as resumed:
        health = resumed.wait_ready()
        assert (health["state"], health["step"], health["trainer_epoch"]) == ("ready", 2, 1)
        resumed.step(3)
        resumed.step(4)
        assert largest_difference(resumed.parameters(4), reference.last) == 0
        assert resumed.stop() == 0


def test_two_replicas_give_the_same_parameters(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    with trainer(tmp_path / "two", model_dir, processes=2, sharding="ddp") as two:
        assert two.wait_ready()["world_size"] == 2
        for number in range(1, 5):
            two.step(number)
        assert largest_difference(two.parameters(4), reference.last) < 1e-5
        assert two.stop() == 0


def test_two_shards_resume_a_replica_s_checkpoint_and_the_other_way_round(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    options: dict[str, Any] = {"resume": reference.checkpoint, "sharding": "fsdp2"}
    with trainer(tmp_path / "two", model_dir, processes=2, **options) as two:
        assert two.wait_ready()["step"] == 2
        path = two.checkpoint(3, {"position": 3})
        assert "sharded" in two.log.read_text()
        two.step(4)
        assert largest_difference(two.parameters(4), reference.last) < 1e-5
        assert two.stop() == 0
    with trainer(tmp_path / "one", model_dir, resume=path) as one:
        assert one.wait_ready()["step"] == 3
        one.step(4)
        assert largest_difference(one.parameters(4), reference.last) < 1e-5
        assert one.stop() == 0


def test_the_kl_to_the_reference_starts_at_zero_and_grows(model_dir: Path, tmp_path: Path):
    options: dict[str, Any] = {"kl_coef": 0.1, "sharding": "fsdp2"}
    with trainer(tmp_path / "kl", model_dir, processes=2, **options) as two:
        two.wait_ready()
        first, second = (two.step(number)["metrics"]["kl"] for number in (1, 2))
        assert abs(first) < 1e-6
        assert second > 1e-6
        assert two.stop() == 0


def test_a_world_of_the_wrong_size_fails_at_start_and_says_so(model_dir: Path, tmp_path: Path):
    with trainer(tmp_path / "wrong", model_dir, processes=1, world_size=2) as wrong:
        health = wrong.wait_ready()
        assert health["state"] == "failed"
        assert "rank 0 is in a world of 1, but the plan has 2 processes" in health["error"]
        assert wrong.stop() != 0


def test_a_step_that_fails_is_reported_and_ends_the_trainer(model_dir: Path, tmp_path: Path):
    with trainer(tmp_path / "failing", model_dir) as failing:
        failing.wait_ready()
        silent = {**batch(1)[0], "loss_mask": bytes(len(batch(1)[0]["loss_mask"]))}
        message = {"step": 1, "checkpoint": None, "trajectories": [silent]}
        assert failing.ask("POST", "/train", msgpack.packb(message))[0] == 202
        _, result = failing.ask("GET", "/train/1?wait_s=20")
        assert result["state"] == "failed"
        assert "step 1 has no generated token to learn from" in result["error"]
        assert failing.stop() != 0


def test_a_dead_rank_is_noticed(model_dir: Path, tmp_path: Path):
    with trainer(tmp_path / "dead", model_dir, processes=2) as two:
        two.wait_ready()
        (victim,) = (
            pid
            for pid, environment in processes_marked(two.marker).items()
            if b"\0RANK=1\0" in environment
        )
        os.kill(victim, signal.SIGKILL)
        assert two.process.wait(60) != 0


def processes_marked(marker: str) -> dict[int, bytes]:
    """Pid to environment. torch starts every rank in a session of its own, so the launcher's
    process group does not hold them."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"LIBRA_RUN={marker}".encode() in environment.split(b"\0"):
                found[int(entry.name)] = environment
    return found
