"""The entry point of a gradient worker.

    accelerate launch ... -m libra_cli.node.gradient.main config.json

A worker is a complete world of its own on one host, without an optimizer. It computes the gradients
of shares of the trainer's steps with the weight version it was told to load; the trainer's ranks
fetch them from its gradient server and add them to their own. So it can come and go while the
trainer's process group stays.

    wait for a command     at most IDLE_S, then all ranks hear ``IdleCommand``, so that a dead rank
                           is noticed
    load a version         every rank reads its shard; the probe is compared with the trainer's
    compute a share        until it is done, dropped, or the worker is told to stop
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.log_ratios import BranchLogRatios, pack_log_ratios
from libra_cli.node.batch.samples import counted
from libra_cli.node.command_queue import IdleCommand, RankServer, StopCommand
from libra_cli.node.credentials import Credentials
from libra_cli.node.gradient.commands import (
    Command,
    ComputeCommand,
    LoadCommand,
    WorkerCommandQueue,
)
from libra_cli.node.gradient.config import WorkerConfig
from libra_cli.node.gradient.server import GradientStore, serve
from libra_cli.node.heartbeat import Heartbeat, beside
from libra_cli.node.rank import attempt, log_ready, start_logging

if TYPE_CHECKING:
    from libra_cli.node.model.policy import PolicyModel

IDLE_S = 10.0
log = logging.getLogger("libra.gradient")


def main() -> int:
    """Run this rank and return its exit code."""
    start_logging()
    config = WorkerConfig.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    rank = int(os.environ.get("RANK", "0"))
    heart = Heartbeat(beside(sys.argv[1]), rank=rank, incarnation=config.incarnation)
    heart.start()
    if rank:
        return attempt(lambda: _work(config, None, heart), None)
    # An exit like any other, so that the memory-backed files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    here = Credentials.here()
    queue = WorkerCommandQueue(config.max_len, GradientStore(config.incarnation))
    RankServer(queue, path=config.socket, token=here.token)
    serve(queue.store, bind=config.side_bind, port=config.side_port, credentials=here)
    return attempt(lambda: _work(config, queue, heart), queue)


def _work(config: WorkerConfig, queue: WorkerCommandQueue | None, heart: Heartbeat) -> None:
    heart.enter("loading the model")
    from transformers.utils.logging import disable_progress_bar

    from libra_cli.node.model.policy import PolicyModel

    disable_progress_bar()
    started = time.monotonic()
    policy = PolicyModel(config)
    policy.enter = heart.enter
    log_ready(log, policy, started)
    WorkerRank(config, queue, policy).serve()


class WorkerRank:
    """One rank of a gradient worker. Only rank 0 has a queue."""

    def __init__(
        self, config: WorkerConfig, queue: WorkerCommandQueue | None, policy: PolicyModel
    ) -> None:
        from libra_cli.node.gradient.writer import GradientWriter

        if (queue is None) != (policy.rank > 0):
            raise TrainerError(f"RANK says otherwise than accelerate: {policy.rank}")
        self.queue = queue
        self.policy = policy
        self.training = config.training
        store = None if queue is None else queue.store
        dtype = config.training.worker_gradients
        self.writer = GradientWriter(policy, store, config.outbox, dtype)

    def serve(self) -> None:
        """Carry out commands until a ``StopCommand`` comes, and leave the process group."""
        if self.queue is not None:
            self.writer.clear()
            self.queue.ready()
        try:
            while self._obey(self._next()):
                pass
        finally:
            if self.queue is not None:
                self.writer.clear()
        self.policy.close()

    def _next(self) -> Command:
        if self.queue is None:
            self.policy.enter("waiting for rank 0")
        else:
            self.policy.enter("waiting for a command")
        given: Command | None = self.queue.next(IDLE_S) if self.queue is not None else None
        return cast("Command", self.policy.broadcast(given))

    def _obey(self, command: Command) -> bool:
        """Carry out a command; tell whether to go on afterwards."""
        match command:
            case LoadCommand():
                self._load(command)
            case ComputeCommand():
                self._compute(command)
            case IdleCommand():
                pass
            case StopCommand():
                return False
        return True

    def _load(self, command: LoadCommand) -> None:
        from libra_cli.node.gradient.loading import load_version

        self.policy.enter("loading a version")
        began = time.monotonic()
        try:
            gap = load_version(self.policy, Path(command.directory))
        except TrainerError as error:
            if self.queue is not None:
                self.queue.not_loaded(command, str(error))
            return
        if self.queue is not None:
            self.queue.loaded(command, gap, time.monotonic() - began)

    def _compute(self, command: ComputeCommand) -> None:
        from libra_cli.node.model.compiled import CLOCK

        began = CLOCK.without()
        self.writer.begin(command.step)
        samples = counted(command.samples, self.training)
        self.policy.log_ratios = {}
        sums = self.policy.gradients_of(samples, before=self._before)
        log_ratios: list[BranchLogRatios] = []
        if sums is not None:
            log_ratios = self.policy.gather(self.policy.log_ratios)
            self.writer.finish()
        if self.queue is None:
            return
        seconds = CLOCK.without() - began
        # Free first: the next version may be loaded as soon as the trainer has the share.
        self.queue.computed()
        if sums is not None:
            tokens = sum(sample.generated for sample in samples)
            found = {key: one for rank in log_ratios for key, one in rank.items()}
            packed = pack_log_ratios(found)
            self.queue.store.done(command.step, sums, tokens, seconds, packed)
            log.info("share of step %d: %d tokens, %.2f s", command.step, tokens, seconds)

    def _before(self, last: bool) -> bool:
        """Tell, ahead of every micro-batch, whether anybody still wants the share."""
        wanted = self.policy.broadcast(None if self.queue is None else self.queue.store.wanted())
        self.writer.before(last)
        return bool(wanted)


if __name__ == "__main__":
    sys.exit(main())
