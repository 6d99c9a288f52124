"""The HTTP side of a gradient worker's first rank: ready, load a version, take a share."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import msgpack

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import TrainSample
from libra_cli.core.events import PublishedVersion
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.supervision.answers import finite, reads_answers
from libra_cli.runtime.trainer.client import pack_sample
from libra_cli.runtime.trainer.connection import Conflict
from libra_cli.runtime.trainer.rank_client import CALL_TIMEOUT_S, POLL_S, RankClient


class WorkerClient(RankClient):
    """A gradient worker, seen from the controller."""

    who = "gradient worker"

    @reads_answers(TrainerError)
    async def wait_ready(self, *, timeout_s: float) -> None:
        """Every rank is there. Raises TrainerError."""
        await self._ready(timeout_s=timeout_s)

    @reads_answers(TrainerError)
    async def load(self, directory: str, published: PublishedVersion, *, timeout_s: float) -> float:
        """Load a version; returns the gap of its probe to the trainer's, in nats.

        A share under way, which nobody can want any more, is dropped first.

        Raises:
            TrainerError: it does not fit, or was not loaded in time.
        """
        body = {
            "directory": directory,
            "name": published.name,
            "version": published.version.step,
            "trainer_incarnation": published.version.trainer_incarnation,
        }
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                data = json.dumps(body).encode()
                answer = await self._call("POST", "/load", data, timeout_s=timeout_s)
                return finite(answer["gap"])
            except Conflict:
                if time.monotonic() > give_up:
                    raise
            await self._drop()
            await asyncio.sleep(POLL_S)

    async def _drop(self) -> None:
        health = await self._call("GET", "/health", timeout_s=CALL_TIMEOUT_S)
        body = json.dumps({"step": health["step"]}).encode()
        await self._call("POST", "/drop", body, timeout_s=CALL_TIMEOUT_S)

    @reads_answers(TrainerError)
    async def share(self, step: int, held: WeightVersion, samples: Sequence[TrainSample]) -> None:
        """Hand over a share of a step; the core fetches what comes of it. Raises TrainerError."""
        message = {
            "step": step,
            "trainer_incarnation": held.trainer_incarnation,
            "incarnation": self.incarnation,
            "version": held.name,
            "trajectories": [pack_sample(sample) for sample in samples],
        }
        body = bytes(msgpack.packb(message))
        await self._call("POST", "/share", body, timeout_s=CALL_TIMEOUT_S)
