"""Trainers of ranks that shard, each in a process: over NCCL on GPUs, over gloo on the CPU.

python -m tests.gpu.ranks WORK DEVICE BASE ANSWER [KEY=VALUE ...]       # a rank, by its environment
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from libra_cli.node.model import compiled
from libra_cli.node.trainer import checkpoint
from libra_cli.node.trainer.trainer import Trainer
from tests.gpu.model import ON_GPU, REHEARSED, Size, batch
from tests.gpu.place import Place
from tests.gpu.trainer import LEARNING_RATE, apart, config_of, gradient_of, peak_gib
from tests.trainers import free_port

LIMIT_S = 900.0
BYTES = 2**28
PROBED = list(range(5, 69))


def sharded(place: Place) -> dict[str, Any]:
    """One rank that shards, beside the trainer that does not."""
    full = _in_ranks(place, 1, "step", checkpointing="full")
    selective = _in_ranks(place, 1, "step", checkpointing="selective")
    return {
        "shards": full["sharded"] and selective["sharded"],
        "gradient_gap": max(full["gradient_gap"], selective["gradient_gap"]),
        "speed": place.noted("step_s") / full["step_s"],
        "selective_speed": full["step_s"] / selective["step_s"],
        "selective_gib": selective["peak_gib"] - full["peak_gib"],
        "peak_gib": full["peak_gib"],
    }


def compiled_layers(place: Place) -> dict[str, Any]:
    """Such a rank whose layers are compiled, beside one whose layers are not."""
    plain = _in_ranks(place, 1, "step", checkpointing="full", kept="plain.pt")
    one = _in_ranks(place, 1, "step", checkpointing="full", compile="yes", beside="plain.pt")
    return {
        "gradient_gap": one["gradient_gap"],
        "speed": plain["step_s"] / one["step_s"],
        "compile_s": one["compile_s"],
        "step_s": one["step_s"],
        "plain_step_s": plain["step_s"],
        "peak_gib": one["peak_gib"],
        "plain_peak_gib": plain["peak_gib"],
    }


def two_ranks(place: Place) -> dict[str, Any]:
    """Two ranks beside the trainer of one; what they save is resumed by one, which differs after
    its next step by a share of what the step changes."""
    step = _in_ranks(place, 2, "step", checkpointing="full")
    moving = {"checkpointing": "full", "learning_rate": "1e-3"}
    saved = _in_ranks(place, 2, "save", **moving)
    resumed = _in_ranks(place, 1, "resume", **moving, path=saved["path"])
    return {
        "shards": step["shards"],
        "gradient_gap": step["gradient_gap"],
        "resumed_gap": _mean_gap(resumed["after"], saved["after"])
        / _mean_gap(saved["before"], saved["after"]),
        "step_s": step["step_s"],
    }


def all_reduce(place: Place) -> dict[str, Any]:
    """The doctor's all-reduce, a rank on each GPU, or two on the CPU."""
    world, backend = (place.gpus, "nccl") if place.gpus else (2, "gloo")
    port = str(free_port())
    command = [sys.executable, "-m", "libra_cli.node.checks.all_reduce", backend]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), "127.0.0.1", port, str(BYTES)],
            env=os.environ | _interfaces() | _only(place, rank),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = _ended(ranks)
    seconds = json.loads(told[0].splitlines()[-1])["seconds"]
    return {"ranks": world, "gb_per_s": BYTES / seconds / 1e9}


def _mean_gap(first: Sequence[float], second: Sequence[float]) -> float:
    return fmean(abs(one - other) for one, other in zip(first, second, strict=True))


def _in_ranks(place: Place, world: int, work: str, **given: str) -> dict[str, Any]:
    """What rank 0 of a world answers."""
    port = str(free_port())
    answer = place.base / f"{work}-{world}-answer.json"
    words = [f"{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "tests.gpu.ranks", work, place.device, str(place.base)]
    ranks = [
        subprocess.Popen(
            [*command, str(answer), *words],
            env=os.environ | _interfaces() | _of_a_world(place, rank, world, port),
        )
        for rank in range(world)
    ]
    _ended(ranks)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _interfaces() -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _of_a_world(place: Place, rank: int, world: int, port: str) -> dict[str, str]:
    """The environment of a rank; one alone is in no world, as where libra starts it."""
    precision = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    if not place.gpus:
        precision["ACCELERATE_USE_CPU"] = "true"
    if world == 1:
        return precision
    return precision | {
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }


def _only(place: Place, rank: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(rank)} if place.gpus else {}


def _ended(ranks: list[subprocess.Popen[Any]]) -> list[str]:
    """What each printed, if that was caught.

    Raises:
        RuntimeError: one of them failed.
    """
    deadline = time.monotonic() + LIMIT_S
    try:
        told = [rank.communicate(timeout=deadline - time.monotonic())[0] or "" for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    return told


# -- in a rank -------------------------------------------------------------------------------------


def _step(
    one: Trainer,
    size: Size,
    base: Path,
    *,
    beside: str = "gradient.pt",
    kept: str = "",
    **given: str,
) -> dict[str, Any]:
    wanted, found = torch.load(base / beside), gradient_of(one, size)
    gap = apart(found, wanted)
    if kept:
        torch.save(found, base / kept)
    one.train(0, batch(size, 0, one.logprobs_of))
    peak_gib(one.device.type, anew=True)
    seconds = []
    for number in range(3):
        samples = batch(size, number, one.logprobs_of)
        began = time.monotonic()
        one.train(number, samples)
        seconds.append(time.monotonic() - began)
    return {
        "sharded": one.sharded,
        "shards": one.shards,
        "gradient_gap": gap,
        "step_s": min(seconds),
        "compile_s": compiled.CLOCK.seconds,
        "peak_gib": peak_gib(one.device.type),
    }


def _save(one: Trainer, size: Size, base: Path, **given: str) -> dict[str, Any]:
    one.train(1, batch(size, 1, one.logprobs_of))
    path = checkpoint.save(one, base / "checkpoints", ledger={"step": 1}, keep=1)
    before = one.logprobs_of(PROBED)
    one.train(2, batch(size, 2, one.logprobs_of))
    return {"path": str(path), "before": before, "after": one.logprobs_of(PROBED)}


def _resume(one: Trainer, size: Size, base: Path, *, path: str, **given: str) -> dict[str, Any]:
    checkpoint.load(one, Path(path))
    one.train(2, batch(size, 2, one.logprobs_of))
    return {"after": one.logprobs_of(PROBED)}


def main(arguments: list[str]) -> None:
    """Do the work of one rank; rank 0 writes the answer."""
    work, device, base, answer, *words = arguments
    given = dict(word.split("=", 1) for word in words)
    size = ON_GPU if device == "cuda" else REHEARSED
    works: dict[str, Callable[..., dict[str, Any]]] = {
        "step": _step,
        "save": _save,
        "resume": _resume,
    }
    world = int(os.environ.get("WORLD_SIZE", "1"))
    training = {
        "learning_rate": float(given.get("learning_rate", LEARNING_RATE)),
        "micro_batch_tokens": size.tokens,
        "activation_checkpointing": given["checkpointing"],
        "compile": "compile" in given,
        "sharding": "fsdp2",
    }
    if device == "cpu" and shutil.which("g++") is None:
        compiled.BACKEND = "aot_eager"
    one = Trainer(config_of(Path(base), training, size.tokens, world=world))
    found = works[work](one, size, Path(base), **given)
    if one.rank == 0:
        Path(answer).write_text(json.dumps(found))
    one.close()


if __name__ == "__main__":
    main(sys.argv[1:])
