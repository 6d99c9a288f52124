"""The controller's client of a rank 0, be it the trainer's or a gradient worker's."""

from __future__ import annotations

import asyncio

from libra_cli.config.errors import TrainerError
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.control import ControlClient
from libra_cli.runtime.processes.stream import Answer, StreamErrors
from libra_cli.runtime.supervision.answers import reads_answers
from libra_cli.runtime.trainer.connection import Unreachable

SILENCE_S = 120.0
"""Reading a large batch, or importing, may keep a first rank from answering so long."""
STOP_S = 5.0


class RankClient(ControlClient):
    """Gives orders to rank 0 of a trainer or of a gradient worker."""

    who = "rank"

    def __init__(self, incarnation: int, endpoint: Endpoint, token: str) -> None:
        errors = StreamErrors(TrainerError, TrainerError, Unreachable)
        super().__init__(self.who, endpoint, token, errors, silence_s=SILENCE_S)
        self.incarnation = incarnation

    async def _ready(self, *, timeout_s: float) -> Answer:
        """Return rank 0's answer once every rank is there.

        Raises:
            TrainerError: a rank failed, or not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._persist("ready", {}, patience_s=timeout_s)
        except TimeoutError as error:
            raise TrainerError(f"the {self.who} is not ready after {timeout_s:.0f} s") from error

    @reads_answers(TrainerError)
    async def stop(self) -> None:
        """Ask every rank to leave; raises TrainerError. The agent makes sure that they do."""
        await self._call("stop", {}, timeout_s=STOP_S)
