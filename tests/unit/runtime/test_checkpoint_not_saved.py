"""A checkpoint that cannot be written is an event of its own, and no death of the trainer."""

from __future__ import annotations

import asyncio

import pytest

from libra_cli.config.errors import TrainerError
from libra_cli.core.events import CheckpointFailed, CheckpointSaved
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.stream import Answer
from libra_cli.runtime.trainer.client import TrainerClient
from libra_cli.runtime.trainer.connection import NotSaved
from libra_cli.runtime.trainer.processes import saved_or_not


class OneAnswer(TrainerClient):
    """A trainer that says of every checkpoint that the disk is full."""

    async def _call(
        self, operation: str, order: Answer, *, timeout_s: float | None = None
    ) -> Answer:
        return {"error": "disk full"}


@pytest.mark.parametrize("with_a_step", [True, False])
def test_the_trainer_says_why_it_could_not_write_one(with_a_step: bool) -> None:
    async def ask() -> str:
        client = OneAnswer(1, Endpoint("/nowhere.sock"), "token")
        if with_a_step:
            return await client.wait_checkpoint(3, patience_s=1.0)
        return await client.checkpoint({}, patience_s=1.0)

    with pytest.raises(NotSaved, match="disk full"):
        asyncio.run(ask())


def test_that_is_a_failed_checkpoint_and_all_else_the_trainers_failure() -> None:
    async def ends(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "/there"

    assert asyncio.run(saved_or_not(2, 3, ends(None))) == CheckpointSaved(2, 3, "/there")
    told = asyncio.run(saved_or_not(2, 3, ends(NotSaved("disk full"))))
    assert told == CheckpointFailed(2, 3, "disk full")
    with pytest.raises(TrainerError):
        asyncio.run(saved_or_not(2, 3, ends(TrainerError("died"))))
