"""Runs of libra: one that serves and trains on this machine, and one whose slot changes sides."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.place import Place

LIBRA = [sys.executable, "-c", "from libra_cli.cli.main import main; main()"]
LIMIT_S = 1500.0
COMMAND_S = 120.0
STEPS = 10
STEPS_OF_MOVES = 1000
"""More than two moves take; the run is stopped after them."""
LOOK_S = 1.0
CPU_SHARES = "{{rollout: {:.3f}, train: 0.3}}"
"""Of the memory of a host without GPUs; the server's are 3 GiB, of which 1 is its KV cache."""
RECIPE = """
run: {{name: gpu-check, steps: {steps}}}
nodes: [{{host: local, {nodes}, workdir: {workdir}}}]
model:
  build: {{task: pointer-chase, seed: 0, warm_steps: {warm_steps}}}
  max_len: 512
environment: {{name: pointer-chase}}
rollout:
  group_size: 8
  max_turns: 24
  max_turn_tokens: 16
  buckets: [{{name: all, tensor_parallel: {degree}, max_num_seqs: 64}}]
training:
  groups_per_step: {groups}
  learning_rate: 2e-4
  micro_batch_tokens: 4096
  max_staleness: 1
  checkpoint_every: {steps}
planner: {{kind: fixed}}
"""


def run(place: Place) -> dict[str, Any]:
    """A run to its end: server and trainer share a GPU, or have one or two each, by which the four
    attention heads of the model can be divided."""
    gpus = 4 if place.gpus >= 4 else min(place.gpus, 2)
    nodes = f"gpus: {gpus}, slots: 2, pool: [rollout, train]"
    if gpus < 2:
        memory_gib = psutil.virtual_memory().total / 2**30
        shares = "{rollout: 0.3, train: 0.6}" if gpus else CPU_SHARES.format(3 / memory_gib)
        nodes = f"gpus: {gpus}, share: {shares}"
    scene = _Scene.of(place, "whole", nodes, steps=STEPS, degree=max(1, gpus // 2))
    began = time.monotonic()
    scene.begin().wait(LIMIT_S)
    told = scene.status()
    return {
        "finished": told["step"] == STEPS and told["run"]["state"] == "finished",
        "run_s": time.monotonic() - began,
        "step_s": told["step_s"],
        "logprob_gap": told["logprob_gap"],
        "reward": told["reward"]["last"],
    }


def moves(place: Place) -> dict[str, Any]:
    """A slot that serves is ordered to compute gradients, and to serve again."""
    nodes = "slots: 3, pool: [rollout, hybrid, train]" + (", gpus: 3" if place.gpus else "")
    scene = _Scene.of(place, "moves", nodes, steps=STEPS_OF_MOVES)
    found: dict[str, Any] = {}
    running = scene.begin()
    try:
        scene.wait(running, lambda told: told["step"] >= 1)
        for name, rollout in (("to_training", 1), ("to_rollout", 2)):
            move = scene.order(running, f"rollout={rollout},gradient={2 - rollout},train=1")
            found[f"{name}_s"] = move["ended_at"] - move["started_at"]
            found |= {f"{name}_{one['phase']}_s": one["seconds"] for one in move["phases"]}
        scene.libra("stop", str(scene.directory), "--now")
    finally:
        running.terminate()
        running.wait(LIMIT_S)
    return {"finished": True, **found}


@dataclass(frozen=True)
class _Scene:
    """A recipe in a directory of its own, and the run of it."""

    base: Path

    @classmethod
    def of(cls, place: Place, name: str, nodes: str, *, steps: int, degree: int = 1) -> _Scene:
        """Write the recipe."""
        base = place.base / "runs" / name
        base.mkdir(parents=True, exist_ok=True)
        text = RECIPE.format(
            nodes=nodes,
            steps=steps,
            degree=degree,
            workdir=place.base / "host",
            warm_steps=350 if place.gpus else 100,
            groups=16 if place.gpus else 4,
        )
        (base / "recipe.yaml").write_text(text)
        return cls(base)

    @property
    def directory(self) -> Path:
        """The newest run's."""
        return max((self.base / "runs").iterdir(), key=lambda path: path.stat().st_mtime)

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the run."""
        return subprocess.Popen([*LIBRA, "run", "recipe.yaml"], cwd=self.base)

    def libra(self, *arguments: str) -> str:
        """What another command prints.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(
            [*LIBRA, *arguments], cwd=self.base, capture_output=True, text=True, timeout=COMMAND_S
        )
        if done.returncode:
            raise RuntimeError(f"libra {arguments[0]} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What ``libra status --json`` tells."""
        told: dict[str, Any] = json.loads(self.libra("status", str(self.directory), "--json"))
        return told

    def order(self, running: subprocess.Popen[bytes], split: str) -> dict[str, Any]:
        """Order a split; returns the move once it is done.

        Raises:
            RuntimeError: it failed.
        """
        number = len(self.status()["moves"])
        self.libra("rebalance", str(self.directory), "--to", split)
        told = self.wait(
            running, lambda told: len(told["moves"]) > number and told["moves"][-1]["ended_at"]
        )
        move: dict[str, Any] = told["moves"][-1]
        if move["state"] != "done":
            raise RuntimeError(f"the move to {split} failed: {move['detail']}")
        return move

    def wait(
        self, running: subprocess.Popen[bytes], holds: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any]:
        """The status of the run as soon as something holds of it.

        Raises:
            RuntimeError: the run has ended, or it took too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and running.poll() is None:
            time.sleep(LOOK_S)
            if any((self.base / "runs").glob("*/libra.db")) and holds(told := self.status()):
                return told
        raise RuntimeError(f"the run ended with {running.poll()}, or nothing happened in time")
