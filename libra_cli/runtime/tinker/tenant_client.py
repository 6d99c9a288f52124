"""The controller's client of the process that trains the adapters of tenants."""

from __future__ import annotations

from libra_cli.config.errors import TrainerError
from libra_cli.runtime.processes.stream import Answer
from libra_cli.runtime.supervision.answers import reads_answers
from libra_cli.runtime.trainer.rank_client import RankClient


class TenantClient(RankClient):
    """Gives the orders of ``libra_cli.node.tenants.main`` to its process."""

    who = "trainer of tenants"

    @reads_answers(TrainerError)
    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return when it has read the model; raises TrainerError."""
        await self._ready(timeout_s=timeout_s)

    @reads_answers(TrainerError)
    async def order(self, operation: str, order: Answer) -> Answer:
        """Have an order carried out, after those that came before it; raises TrainerError."""
        return await self._call(operation, order)
