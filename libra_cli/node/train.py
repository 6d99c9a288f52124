"""One rank of the trainer.

    accelerate launch ... -m libra_cli.node.train <config.json>

    consumes            waits for                               unblocked by
    rank 0: an order    the controller, 10 s at a time          HTTP; else it says "nothing" to all
    others: an order    rank 0's broadcast                      at least every 10 s

Rank 0 answers HTTP (``desk``) and tells every order to the others. Whatever goes wrong in an order
is the end of this process: rank 0 says why to whoever asks and leaves, the launcher ends the other
ranks, and the controller starts a new trainer from the last checkpoint. Nothing is retried here.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from libra_cli.node import batching, checkpoint, weights
from libra_cli.node.config import TrainerConfig
from libra_cli.node.desk import Desk
from libra_cli.node.learner import Learner

IDLE_S = 10.0
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
LAST_WORDS_S = 5.0
"""How long a failed rank 0 stays to be asked for the reason."""


class Trainer:
    """Carries out orders on every rank; the answers are rank 0's."""

    def __init__(self, accelerator: Accelerator, config: TrainerConfig) -> None:
        self._accelerator = accelerator
        self._config = config
        self._learner = Learner(accelerator, config)
        self.step = 0
        if config.resume is not None:
            self.step = checkpoint.load(accelerator, Path(config.resume))
        self._probe_ids = weights.probe_ids(self._learner.vocabulary, config.probe_tokens)

    def publish(self) -> dict[str, Any]:
        """Write the version of the current step; the answer is empty but on rank 0."""
        config = self._config
        logprobs = self._learner.probe(self._probe_ids)
        state = self._learner.state()
        if not self._accelerator.is_main_process:
            return {}
        return asdict(
            weights.publish(
                state,
                (self._probe_ids, logprobs),
                config.versions,
                version=self.step,
                trainer_epoch=config.trainer_epoch,
                keep=config.keep_versions,
            )
        )

    def train(self, order: dict[str, Any]) -> dict[str, Any]:
        """One optimizer step, published; with a checkpoint if the order wants one."""
        metrics = self._learner.step(batching.unpack(order["trajectories"]))
        self.step = int(order["step"])
        version = self.publish()
        wanted = order["checkpoint"]
        path = self.save(wanted["ledger"]) if wanted is not None else ""
        return {"metrics": metrics, "version": version, "checkpoint": path}

    def save(self, ledger: dict[str, Any]) -> str:
        """Write a checkpoint of the current step; returns its path."""
        directory = Path(self._config.checkpoint_dir)
        keep = self._config.training.keep_checkpoints
        saved = checkpoint.save(
            self._accelerator, directory, step=self.step, ledger=ledger, keep=keep
        )
        return str(saved)


def serve(accelerator: Accelerator, trainer: Trainer, desk: Desk | None) -> None:
    """Take orders until one says stop."""
    while True:
        order = _next(accelerator, desk)
        if order is None:
            continue
        if order["do"] == "stop":
            return
        if order["do"] == "train":
            answer = trainer.train(order)
        else:
            answer = {"path": trainer.save(order["ledger"])}
        if desk is not None:
            desk.tell(step=trainer.step, **_published(answer))
            desk.done(order["key"], answer)


def _published(answer: dict[str, Any]) -> dict[str, Any]:
    return {"published": answer["version"]} if "version" in answer else {}


def _next(accelerator: Accelerator, desk: Desk | None) -> dict[str, Any] | None:
    """Rank 0's next order, on every rank; None keeps idle ranks from timing out."""
    box = [desk.take(IDLE_S) if desk is not None else None]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def make_accelerator(config: TrainerConfig) -> Accelerator:
    """The world, checked.

    Raises:
        RuntimeError: it has not the size that was asked for. (``accelerate launch --cpu`` over
            several machines makes several worlds of one, and says nothing.)
    """
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    if accelerator.num_processes != config.world_size:
        raise RuntimeError(
            f"the trainer's world has {accelerator.num_processes} processes, the plan has "
            f"{config.world_size} (rank {accelerator.process_index}, "
            f"{accelerator.distributed_type})"
        )
    return accelerator


def main() -> None:
    """Join the world, publish the first version, take orders."""
    config = TrainerConfig.load(Path(sys.argv[1]))
    token = Path(os.environ["LIBRA_TOKEN_FILE"]).read_text().strip()
    desk = Desk(config.port, token) if int(os.environ.get("RANK", "0")) == 0 else None
    try:
        accelerator = make_accelerator(config)
        trainer = Trainer(accelerator, config)
        published = trainer.publish()
        if desk is not None:
            desk.tell(
                state="ready",
                world_size=accelerator.num_processes,
                step=trainer.step,
                trainer_epoch=config.trainer_epoch,
                published=published,
            )
        serve(accelerator, trainer, desk)
    except Exception as error:  # noqa: BLE001  whatever it was, whoever asks must hear it
        traceback.print_exc()
        if desk is not None:
            desk.fail(f"{type(error).__name__}: {error}")
            time.sleep(LAST_WORDS_S)
        # Not sys.exit: a rank that waits in a collective would keep its threads, and us, alive.
        os._exit(1)
    accelerator.end_training()
    if desk is not None:
        desk.close()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
