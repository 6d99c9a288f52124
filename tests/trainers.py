"""Real trainers and gradient workers for tests: ``accelerate launch`` on this host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libra_cli.config.training import TrainingSpec
from libra_cli.node.batch.log_ratios import BranchLogRatios, read_log_ratios
from libra_cli.node.trainer.config import TrainerConfig
from tests import control
from tests.credentials import credentials_of, url_of
from tests.sockets import socket_path

TOKEN = "of-this-run"
START_S = 120.0
STEP_S = 60.0
PACKAGE_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class World:
    """A running ``accelerate launch``."""

    socket: str
    process: subprocess.Popen[bytes]
    log: Path
    marker: str

    def ask(self, operation: str, order: Mapping[str, Any] | None = None) -> tuple[str, Any]:
        """The outcome of an order, and its answer, or why there is none."""
        return control.ask(self.socket, TOKEN, operation, order, timeout_s=START_S)

    def told(self, operation: str, order: Mapping[str, Any] | None = None) -> dict[str, Any]:
        outcome, answer = self.ask(operation, order)
        assert outcome == "done", answer
        found: dict[str, Any] = answer
        return found

    def wait_ready(self) -> dict[str, Any]:
        """What it tells once every rank is there. Raises AssertionError with what it says else."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                return self.told("ready")
            except OSError:  # it does not listen yet
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def stop(self) -> int:
        with contextlib.suppress(OSError):  # it may be gone before it answers
            self.ask("stop")
        return self.process.wait(60)

    def signal(self, number: signal.Signals) -> None:
        """Every process of it."""
        for pid in processes_marked(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass(frozen=True)
class Trainer(World):
    """The core."""

    versions: Path

    def step(
        self,
        number: int,
        ledger: Mapping[str, Any] | None = None,
        *,
        trajectories: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        checkpoint = None if ledger is None else {"ledger": ledger}
        given = batch(number) if trajectories is None else trajectories
        self.send(number, given, checkpoint=checkpoint, **more)
        return self.result(number)

    def send(self, number: int, trajectories: Sequence[Mapping[str, Any]], **more: Any) -> None:
        order = {"step": number, "checkpoint": None, "trajectories": trajectories, **more}
        self.told("train", order)

    def result(self, number: int) -> dict[str, Any]:
        """Metrics and version of a step."""
        step = {"step": number}
        return {**self.told("done", step), "version": self.told("published", step)}

    def log_ratios(self, number: int) -> BranchLogRatios:
        """Those of the step that was taken last."""
        return read_log_ratios(self.told("log_ratios", {"step": number})["packed"])

    def accumulate(
        self, step: int, part: int, trajectories: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        about = {"step": step, "part": part}
        self.told("accumulate", about | {"trajectories": trajectories})
        metrics: dict[str, Any] = self.told("accumulated", about)["metrics"]
        return metrics

    def checkpoint(self, number: int, ledger: Mapping[str, Any]) -> Path:
        """Take a step and wait for the checkpoint that was asked for with it."""
        self.step(number, ledger)
        return Path(self.told("saved", {"step": number})["path"])

    def parameters(self, version: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        (directory,) = self.versions.glob(f"v{version:06d}-e*")
        files = sorted(directory.glob("*.safetensors"))
        return {name: one for file in files for name, one in load_file(file).items()}


@dataclass(frozen=True)
class Worker(World):
    """A gradient worker of slot ``gpu-01/0``, incarnation 3."""

    side_port: int
    outbox: Path

    def load(self, directory: Path) -> None:
        """Load a version, whose probe it must give as the core does."""
        order = {"directory": str(directory), "name": directory.name, "trainer_incarnation": 0}
        assert self.told("load", order)["gap"] < 1e-5

    def share(self, step: int, trajectories: Sequence[Mapping[str, Any]]) -> None:
        order = {
            "step": step,
            "trainer_incarnation": 0,
            "incarnation": 3,
            "version": f"v{step - 1:06d}-e0",
            "trajectories": trajectories,
        }
        self.told("share", order)

    def offer(self, step: int, groups: Sequence[int], **changes: Any) -> dict[str, Any]:
        """What the core is told of the share."""
        share = {
            "worker": "gpu-01/0",
            "incarnation": 3,
            "url": url_of(self.side_port),
            "version": f"v{step - 1:06d}-e0",
            "trajectories": [[group, member] for group in groups for member in range(4)],
        }
        return share | changes


def batch(step: int, *, groups: int = 4) -> list[dict[str, Any]]:
    """Groups of four, the same for every trainer; lengths differ, so cuts do."""
    rng = np.random.default_rng([7, step])
    made = []
    for group in range(groups):
        for member in range(4):
            length = int(rng.integers(12, 60))
            mask = (rng.random(length) < 0.5).astype("<i1")
            mask[0], mask[-1] = 0, 1
            logprobs = np.where(mask, -5.5 - 0.3 * rng.random(length), 0).astype("<f4")
            reward = float(rng.random() < 0.5)
            made.append(
                {
                    "group": group,
                    "member": member,
                    "token_ids": rng.integers(3, 268, length).astype("<i4").tobytes(),
                    "logprobs": logprobs.tobytes(),
                    "loss_mask": mask.tobytes(),
                    "reward": reward,
                    "fresh": member % 2,
                    "behind": [],
                    "advantages": [[0, 2 * reward - 1]],
                }
            )
    return made


def with_turns(trajectories: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same in three turns each, whose rewards sum up to that of the trajectory."""
    made = []
    for one in trajectories:
        tokens = len(one["loss_mask"])
        rewards = (0.25, -0.125 * one["member"], one["reward"] - 0.25 + 0.125 * one["member"])
        begins = (1, tokens // 3, 2 * tokens // 3)
        turns = [[turn, begins[turn], rewards[turn]] for turn in range(3)]
        made.append({**one, "advantages": [], "turns": turns})
    return made


def of_groups(trajectories: Sequence[Mapping[str, Any]], *groups: int) -> list[Mapping[str, Any]]:
    return [one for one in trajectories if one["group"] in groups]


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
    incarnation: int = 0,
    keep_versions: int = 10,
    precision: str = "no",
    **training: Any,
) -> Iterator[Trainer]:
    """Start one; whatever happens, none of its processes is left afterwards."""
    path = socket_path()
    config = {
        "run_id": "run",
        "model_dir": str(model_dir),
        "weights_dir": str(directory / "weights"),
        "checkpoint_dir": str(directory / "checkpoints"),
        "socket": path,
        "world_size": world_size or processes,
        "trainer_incarnation": incarnation,
        "seed": 0,
        "dtype": "float32",
        "temperature": 0.9,
        "training": training_spec(training),
        "max_len": 128,
        "resume": None if resume is None else str(resume),
        "keep_versions": keep_versions,
    }
    with _launched("tests.patient_core", directory, config, processes, precision) as (process, log):
        yield Trainer(path, process, log, str(directory), directory / "weights" / "run")


@contextmanager
def worker(
    directory: Path, model_dir: Path, *, processes: int = 1, **training: Any
) -> Iterator[Worker]:
    """Start one; whatever happens, none of its processes is left afterwards."""
    path, side_port = socket_path(), free_port()
    config = {
        "run_id": "run",
        "slot": "gpu-01/0",
        "incarnation": 3,
        "model_dir": str(model_dir),
        "socket": path,
        "side_bind": "127.0.0.1",
        "side_port": side_port,
        "world_size": processes,
        "seed": 0,
        "temperature": 0.9,
        "training": training_spec(training),
        "max_len": 128,
        "shm_dir": str(directory / "shm"),
    }
    with _launched("libra_cli.node.gradient.main", directory, config, processes) as (process, log):
        outbox = directory / "shm" / "run-gpu-01-0"
        yield Worker(path, process, log, str(directory), side_port, outbox)


def training_spec(changes: Mapping[str, Any]) -> dict[str, Any]:
    spec = {
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "micro_batch_tokens": 200,
        "keep_checkpoints": 2,
        **changes,
    }
    return TrainingSpec.model_validate(spec).model_dump(mode="json")


def config_of(model_dir: Path, home: Path, training: Mapping[str, Any]) -> TrainerConfig:
    """Of a trainer in the test's own process, with all that it writes under ``home``."""
    return TrainerConfig(
        run_id="run",
        model_dir=str(model_dir),
        weights_dir=str(home / "weights"),
        checkpoint_dir=str(home / "checkpoints"),
        socket="",
        world_size=1,
        trainer_incarnation=0,
        seed=0,
        dtype="float32",
        temperature=0.9,
        training=TrainingSpec.model_validate(training_spec(training)),
        max_len=128,
    )


@contextmanager
def _launched(
    module: str, directory: Path, config: Mapping[str, Any], processes: int, precision: str = "no"
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    directory.mkdir()
    marker = str(directory)
    (directory / "token").write_text(TOKEN)
    (directory / "credentials.json").write_text(credentials_of(token=TOKEN).as_json())
    (directory / "config.json").write_text(json.dumps(config))
    world = ["--num_machines", "1", "--num_processes", str(processes)]
    if processes > 1:
        world += ["--multi_gpu", "--machine_rank", "0"]
        world += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    argv = [sys.executable, "-m", "libra_cli.node.rendezvous", "accelerate.commands.launch"]
    argv += world
    argv += ["--mixed_precision", precision, "--dynamo_backend", "no", "-m", module]
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "LIBRA_RUN": marker,
        "LIBRA_TOKEN_FILE": str(directory / "token"),
        "LIBRA_CREDENTIALS_FILE": str(directory / "credentials.json"),
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
        yield process, log
    finally:
        for pid in processes_marked(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def relative_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Norm of the difference of all parameters over the norm of the second's."""
    assert first.keys() == second.keys()
    apart = sum(float((first[name] - second[name]).double().square().sum()) for name in first)
    whole = sum(float(second[name].double().square().sum()) for name in first)
    return float((apart / whole) ** 0.5)


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
