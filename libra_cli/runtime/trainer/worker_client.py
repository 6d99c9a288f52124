"""The controller's side of a gradient worker's first rank: ready, load a version, take a share."""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import TrainSample
from libra_cli.core.events import PublishedVersion
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.supervision.answers import finite, reads_answers
from libra_cli.runtime.trainer.client import pack_sample
from libra_cli.runtime.trainer.rank_client import RankClient


class WorkerClient(RankClient):
    """Gives the orders of the controller to a gradient worker's rank 0."""

    who = "gradient worker"

    @reads_answers(TrainerError)
    async def wait_ready(self, *, timeout_s: float) -> None:
        await self._ready(timeout_s=timeout_s)

    @reads_answers(TrainerError)
    async def load(self, directory: str, published: PublishedVersion, *, timeout_s: float) -> float:
        """Load a version; returns the gap of its probe to the trainer's, in nats.

        A share under way, which nobody can want any more, is dropped first.

        Raises:
            TrainerError: it does not fit, or was not loaded in time.
        """
        order = {
            "directory": directory,
            "name": published.name,
            "trainer_incarnation": published.version.trainer_incarnation,
        }
        return finite((await self._call("load", order, timeout_s=timeout_s))["gap"])

    @reads_answers(TrainerError)
    async def share(self, step: int, held: WeightVersion, samples: Sequence[TrainSample]) -> None:
        """Hand over a share of a step; the core fetches what comes of it. Raises TrainerError."""
        order = {
            "step": step,
            "trainer_incarnation": held.trainer_incarnation,
            "incarnation": self.incarnation,
            "version": held.name,
            "trajectories": [pack_sample(sample) for sample in samples],
        }
        await self._call("share", order)
