"""A checkpoint that cannot be written is an event of its own, and no death of the trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from libra_cli.config.errors import TrainerError
from libra_cli.core.events import CheckpointFailed, CheckpointSaved
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.trainer.client import TrainerClient
from libra_cli.runtime.trainer.connection import NotSaved
from libra_cli.runtime.trainer.processes import saved_or_not


class OneAnswer:
    """A session in which every request has this answer."""

    closed, status = False, 200

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    @asynccontextmanager
    async def request(self, *arguments: Any, **named: Any) -> AsyncIterator[OneAnswer]:
        yield self

    async def read(self) -> bytes:
        return json.dumps(self.answer).encode()

    async def close(self) -> None: ...


async def client(answer: dict[str, Any]) -> TrainerClient:
    made = TrainerClient(1, Endpoint("/nowhere.sock"), "token")
    await made.close()
    made._session = OneAnswer(answer)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("with_a_step", [True, False])
def test_the_trainer_says_why_it_could_not_write_one(with_a_step: bool) -> None:
    async def ask() -> str:
        if with_a_step:
            told = {"state": "done", "checkpoint": "", "checkpoint_error": "disk full"}
            return await (await client(told)).wait_checkpoint(3, patience_s=1.0)
        return await (await client({"path": "", "error": "disk full"})).checkpoint({})

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
