"""Ranks of the trainer on hosts that share no directory: processes of one machine, over gloo.

They come from a process that has imported torch and computed nothing, since a fork of one that has
would wait for threads that it lacks. Each takes itself for the first rank of its host.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from libra_cli.node.batch.samples import read_samples
from libra_cli.node.trainer import checkpoint
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer
from tests.trainers import batch, free_port, training_spec

WORLD_S = 300
TOKENS = list(range(5, 69))
Work = Callable[..., Any]
"""Called on every rank; what it returns is sent. ``in_world`` gives it a trainer and its host."""


def in_world(
    hosts: Sequence[Path],
    model_dir: Path,
    work: Work,
    *more: object,
    incarnation: int = 1,
    **changes: Any,
) -> list[Any]:
    """What ``work`` returns on every rank; rank i is on host i, where those may be named again.

    ``changes`` are those of the trainer's config.
    """
    configs = [
        trainer_config(host, model_dir, len(hosts), trainer_incarnation=incarnation, **changes)
        for host in hosts
    ]
    more_of = [(config, work, host, *more) for config, host in zip(configs, hosts, strict=True)]
    return in_ranks(hosts, _with_trainer, more_of)


def _with_trainer(config: TrainerConfig, work: Work, *more: object) -> Any:
    return work(Trainer(config), *more)


def in_ranks(hosts: Sequence[Path], work: Work, arguments: Sequence[Sequence[object]]) -> list[Any]:
    """What ``work`` returns in as many processes, which could form a world over gloo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    answers = context.Queue()
    port = free_port()
    ranks = [
        context.Process(
            target=_rank,
            args=(_environment(hosts, rank, port), answers, work, arguments[rank]),
            daemon=True,
        )
        for rank in range(len(hosts))
    ]
    for rank in ranks:
        rank.start()
    try:
        found = dict(answers.get(timeout=WORLD_S) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    problems = [answer[1] for answer in found.values() if answer[0] == "failed"]
    assert not problems, problems[0]
    return [found[rank][1] for rank in range(len(hosts))]


def _environment(hosts: Sequence[Path], rank: int, port: int) -> dict[str, str]:
    return {
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "LIBRA_CREDENTIALS_FILE": str(hosts[rank].parent / "credentials.json"),
        "LOCAL_RANK": str(list(hosts[:rank]).count(hosts[rank])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
    }


def _rank(
    environment: Mapping[str, str], answers: Any, work: Work, arguments: Sequence[object]
) -> None:
    os.environ |= environment
    rank = int(environment["RANK"])
    torch.set_num_threads(1)
    try:
        answers.put((rank, ("done", work(*arguments))))
    except BaseException:  # noqa: BLE001  whoever waits must hear of it
        answers.put((rank, ("failed", traceback.format_exc())))


def trainer_config(
    host: Path, model_dir: Path, world: int, training: Mapping[str, Any] | None = None, **more: Any
) -> TrainerConfig:
    """A trainer's on this host; a rank that is alone is what sharded ones are compared with."""
    sharding = "fsdp2" if world > 1 else "ddp"
    return TrainerConfig.from_json(
        {
            "run_id": "run",
            "model_dir": str(model_dir),
            "weights_dir": str(host / "weights"),
            "checkpoint_dir": str(host / "checkpoints"),
            "socket": "",
            "world_size": world,
            "trainer_incarnation": 1,
            "seed": 0,
            "dtype": "float32",
            "temperature": 0.9,
            "training": training_spec({"sharding": sharding, **(training or {})}),
            "max_len": 128,
            **more,
        }
    )


@dataclass(frozen=True)
class Step:
    """What a step came to on one rank."""

    loss: float
    parameters: dict[str, Any]
    """After it, whole."""
    drawn: tuple[float, float, float]
    """The next random numbers of Python, numpy and torch."""


def step(trainer: Trainer, number: int) -> Step:
    """Take a step."""
    metrics = trainer.train(number, read_samples(batch(number), 128))
    parameters = {name: tensor.numpy().copy() for name, tensor in trainer.whole_weights()}
    drawn = random.random(), float(np.random.rand()), float(torch.rand(1))
    return Step(metrics["loss"], parameters, drawn)


def train(trainer: Trainer, host: Path, scores: Sequence[float | None]) -> tuple[list[float], Step]:
    """A step for each score, each with a checkpoint of which one stays; then one more.

    Returns what the policy of the last checkpoint thinks of ``TOKENS``, and the step after it.
    """
    for number, score in enumerate(scores, 1):
        step(trainer, number)
        ledger = {"step": number, "score": score}
        checkpoint.save(trainer, host / "checkpoints", ledger=ledger, keep=1)
    return trainer.logprobs_of(TOKENS), step(trainer, len(scores) + 1)


def go_on(trainer: Trainer, host: Path, name: str, urls: Sequence[str]) -> Step:
    """Resume from a checkpoint and take the next step."""
    checkpoint.load(trainer, host / "checkpoints" / name, urls)
    return step(trainer, trainer.step + 1)
