"""The entry point of the trainer, one process for each rank.

    accelerate launch ... -m libra_cli.node.trainer.main config.json

Rank 0 takes orders over a control stream (``commands``) and broadcasts every command to the other
ranks; all of them then carry it out, in the same order:

    wait for a command       at most IDLE_S, then all hear ``IdleCommand``: a dead rank is noticed
    take the step            gradients of each rank's samples, one sum, one update
    copy the weights         to ranks that write them meanwhile; the step is ``done``
    write the checkpoint     if it was asked for

Gradients of a step that comes in parts are added part by part, with the weights of the step before.
``rank`` describes how a rank fails. Every wait has a deadline, and every rank tells what it is at
(``heartbeat``), so that the controller sees which one keeps the others waiting.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from libra_cli.config.errors import TrainerError
from libra_cli.node.command_queue import IdleCommand, RankServer, StopCommand
from libra_cli.node.heartbeat import Heartbeat, beside
from libra_cli.node.http import read_token
from libra_cli.node.rank import attempt, last_line, log_ready, start_logging
from libra_cli.node.trainer.commands import (
    AccumulateCommand,
    CheckpointCommand,
    Command,
    CommandQueue,
    TrainCommand,
)
from libra_cli.node.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from libra_cli.node.trainer.trainer import Trainer
    from libra_cli.node.weights.part_writer import PartWriter
    from libra_cli.node.weights.parts import Share
    from libra_cli.node.weights.publisher import Publisher

IDLE_S = 10.0
log = logging.getLogger("libra.trainer")


def main() -> int:
    """Run this rank and return its exit code."""
    start_logging()
    config = TrainerConfig.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    rank = int(os.environ.get("RANK", "0"))
    heart = Heartbeat(beside(sys.argv[1]), rank=rank, incarnation=config.trainer_incarnation)
    heart.start()
    if rank:
        return attempt(lambda: _work(config, None, heart), None)
    # Before torch is imported, so that the controller hears "starting" within a second.
    queue = CommandQueue(config.max_len)
    RankServer(queue, path=config.socket, token=read_token(os.environ["LIBRA_TOKEN_FILE"]))
    return attempt(lambda: _work(config, queue, heart), queue)


def _work(config: TrainerConfig, queue: CommandQueue | None, heart: Heartbeat) -> None:
    heart.enter("loading the model")
    from transformers.utils.logging import disable_progress_bar

    from libra_cli.node.trainer.trainer import Trainer

    disable_progress_bar()
    if config.memory_share is not None:
        import torch

        device = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_per_process_memory_fraction(config.memory_share, device)
    started = time.monotonic()
    rank = TrainerRank(config, queue, Trainer(config), heart)
    rank.begin()
    log_ready(log, rank.trainer, started)
    rank.serve()


class TrainerRank:
    """One rank of the trainer. Only rank 0 has a queue."""

    def __init__(
        self,
        config: TrainerConfig,
        queue: CommandQueue | None,
        trainer: Trainer,
        heart: Heartbeat | None = None,
    ) -> None:
        if (queue is None) != (trainer.rank > 0):
            raise TrainerError(f"RANK says otherwise than accelerate: {trainer.rank}")
        self.config = config
        self.queue = queue
        self.trainer = trainer
        trainer.enter = self.enter = (heart or Heartbeat()).enter
        adapter = trainer.adapter_manifest()
        self.writers = self._writers()
        share = self._share()
        self.publisher = self._open_publisher(queue, adapter, share) if queue is not None else None
        self.part = self._open_part(share) if queue is None and share is not None else None

    def _writers(self) -> int:
        """*Collective.* How many ranks write versions: those that hold the first copy of the
        weights and are on rank 0's host, whose ranks come first."""
        firsts = [place == "0" for place in self.trainer.gather(os.environ.get("LOCAL_RANK", "0"))]
        here = firsts.index(True, 1) if True in firsts[1:] else len(firsts)
        return min(here, self.trainer.shards)

    def _share(self) -> Share | None:
        from libra_cli.node.weights.parts import Share

        rank = self.trainer.rank
        return Share(rank, self.writers) if rank < self.writers else None

    def _open_part(self, share: Share) -> PartWriter:
        from libra_cli.node.weights.part_writer import PartWriter

        return PartWriter(
            self.config.versions,
            trainer_incarnation=self.config.trainer_incarnation,
            dtype=self.trainer.published_dtype,
            share=share,
        )

    def _open_publisher(
        self, queue: CommandQueue, adapter: dict[str, Any] | None, share: Share | None
    ) -> Publisher:
        from libra_cli.node.weights.publisher import Publisher

        def failed(error: BaseException) -> None:
            queue.fail(f"the version was not written: {last_line(error)}")

        return Publisher(
            self.config.versions,
            trainer_incarnation=self.config.trainer_incarnation,
            dtype=self.trainer.published_dtype,
            keep=self.config.keep_versions,
            published=queue.version_published,
            failed=failed,
            adapter=adapter,
            share=share,
        )

    def begin(self) -> None:
        """Resume from a checkpoint if the config names one, and publish the first version."""
        from libra_cli.node.trainer import checkpoint

        if self.config.resume:
            self.enter("resuming from a checkpoint")
            checkpoint.load(self.trainer, Path(self.config.resume), self.config.checkpoint_urls)
        self._publish()
        if self.queue is not None and self.publisher is not None:
            version = self.publisher.wait()
            assert version is not None, "it was just published"
            self.queue.ready(version)

    def serve(self) -> None:
        """Carry out what rank 0 broadcasts until a ``StopCommand`` comes, then close."""
        while True:
            if self.queue is None:
                self.enter("waiting for rank 0")
            else:
                self.enter("waiting for a command")
            given: Command | None = self.queue.next(IDLE_S) if self.queue is not None else None
            command = cast("Command", self.trainer.broadcast(given))
            if isinstance(command, StopCommand):
                if self.publisher is not None:
                    self.publisher.close()
                self.trainer.gather(None)  # until then it may need a part
                if self.part is not None:
                    self.part.close()
                self.trainer.close()
                return
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case TrainCommand():
                self._train(command)
                if command.ledger is not None:
                    self._save(CheckpointCommand(command.ledger))
            case AccumulateCommand():
                metrics = self.trainer.accumulate(command.samples)
                if self.queue is not None:
                    self.queue.accumulated(command.step, command.part, metrics)
            case CheckpointCommand():
                self._save(command)
            case IdleCommand() | StopCommand():
                pass

    def _train(self, command: TrainCommand) -> None:
        started = time.monotonic()
        metrics = self.trainer.train(command.step, command.samples, command.shares)
        stepped = time.monotonic()
        self._publish()
        if self.queue is None:
            return
        ended = time.monotonic()
        metrics |= {"publish_s": ended - stepped, "trainer_s": ended - started}
        self.queue.done(command.step, metrics, self.trainer.packed_log_ratios)
        told = {name: value for name, value in metrics.items() if name != "advantages"}
        log.info("step %d: %s", command.step, json.dumps(told))

    def _publish(self) -> None:
        """Copy the weights to the ranks that write them.

        Others of the first replica, which are on other hosts, send theirs; other replicas have
        nothing to send.
        """
        self.enter("copying the weights")
        with contextlib.ExitStack() as stack:
            if self.publisher is not None:
                stack.enter_context(self.publisher.settled())
            probe = self.trainer.probe()  # no rank gets past this before rank 0 has settled
            weights = self.trainer.written_weights(self.writers)
            if self.publisher is not None:
                self.publisher.stage(weights, version=self.trainer.step, probe=probe)
            elif self.part is not None:
                self.part.stage(weights, version=self.trainer.step)
            elif self.trainer.replica == 0:
                for _ in weights:
                    pass

    def _save(self, command: CheckpointCommand) -> None:
        from libra_cli.node.trainer import checkpoint

        self.enter("writing a checkpoint")
        try:
            path = checkpoint.save(
                self.trainer,
                Path(self.config.checkpoint_dir),
                ledger=command.ledger,
                keep=self.config.training.checkpoints_kept,
            )
        except checkpoint.SaveFailed as error:
            log.warning("the checkpoint of step %d was not written: %s", self.trainer.step, error)
            if self.queue is not None:
                self.queue.not_saved(self.trainer.step, str(error))
        else:
            if self.queue is not None:
                self.queue.saved(self.trainer.step, str(path))


if __name__ == "__main__":
    sys.exit(main())
