"""The trainer or a gradient worker says anything: a TrainerError, never another exception."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import Accumulate, Train
from libra_cli.core.events import PublishedVersion, StepDone, TurnAdvantages
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.trainer import client as client_module
from libra_cli.runtime.trainer import rank_client, worker_client
from libra_cli.runtime.trainer.client import TrainerClient
from libra_cli.runtime.trainer.worker_client import WorkerClient
from tests.unit.fuzz import nonsense

HELD = WeightVersion(1, 0)
SHARE = {
    "worker": "a/0",
    "used": True,
    "reason": "",
    "tokens": 3,
    "seconds": 0.1,
    "waited_s": 0.0,
    "bytes": 10,
    "transfer_s": 0.1,
}
VERSION = {"version": 1, "bytes": 10, "published_at": 1.0}
DONE = {
    "state": "done",
    "metrics": {"loss": 0.5, "reward": None, "shares": [], "advantages": [[0, 1, [0.5, -1]]]},
    "checkpoint": "/checkpoints/1",
    "version": VERSION,
}
HEALTH = {"state": "ready", "published": VERSION, "error": "", "step": 1}
OTHERS = {"path": "/checkpoints/1", "gap": 0.1, "state": "failed", "error": "out of memory"}
CALLS = ("wait_ready", "train", "wait_published", "accumulate", "wait_checkpoint", "checkpoint")


class AnyAnswer:
    """A session in which every request has the same answer."""

    closed = False

    def __init__(self, raw: bytes, status: int) -> None:
        self.raw = raw
        self.status = status
        self.asked = 0

    @asynccontextmanager
    async def request(self, *arguments: Any, **named: Any) -> AsyncIterator[AnyAnswer]:
        self.asked += 1
        if self.asked > 3:  # what never ends has its deadline elsewhere
            raise TrainerError("asked often enough")
        yield self

    async def read(self) -> bytes:
        return self.raw

    async def close(self) -> None: ...


async def client_of(kind: Any, raw: bytes, status: int) -> Any:
    client = kind(1, Endpoint("/nowhere.sock"), "token")
    await client.close()
    client._session = AnyAnswer(raw, status)
    return client


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "POLL_S", 0.0)
    monkeypatch.setattr(rank_client, "POLL_S", 0.0)
    monkeypatch.setattr(worker_client, "POLL_S", 0.0)


async def trained(call: str, raw: bytes, status: int) -> Any:
    client = await client_of(TrainerClient, raw, status)
    try:
        match call:
            case "wait_ready":
                return await client.wait_ready(timeout_s=0.001)
            case "train":
                train = Train(1, 1, (), None, HELD)
                return await client.train(train, (), patience_s=0.0)
            case "accumulate":
                return await client.accumulate(Accumulate(1, 1, 1, ()), patience_s=0.0)
            case "checkpoint":
                return await client.checkpoint({})
            case _:
                return await getattr(client, call)(1, patience_s=0.0)
    finally:
        await client.close()


answers = st.one_of(*(nonsense.json_like(one) for one in (DONE, HEALTH, OTHERS, {"state": "?"})))
statuses = st.sampled_from([200, 200, 200, 202, 204, 404, 409, 500])


@given(call=st.sampled_from(CALLS), raw=answers, status=statuses)
def test_whatever_the_trainer_says_is_read_or_its_error(call, raw, status):
    with nonsense.thrown_at("trainer"):
        done = asyncio.run(trained(call, raw, status))
        if isinstance(done, StepDone):
            assert all(one is None or abs(one) < float("inf") for one in done.metrics.values())


def test_what_a_critic_said_of_turns_comes_with_the_step():
    done = asyncio.run(trained("train", nonsense.as_json(DONE), 200))
    assert done.advantages == (TurnAdvantages(0, 1, (0.5, -1.0)),)
    assert done.metrics == {"loss": 0.5, "reward": None}


@given(call=st.sampled_from(["wait_ready", "load", "share"]), raw=answers, status=statuses)
def test_whatever_a_gradient_worker_says_is_read_or_its_error(call, raw, status):
    async def main() -> Any:
        client = await client_of(WorkerClient, raw, status)
        try:
            match call:
                case "load":
                    published = PublishedVersion(HELD, 10, 0.0)
                    return await client.load("/v", published, timeout_s=0.0)
                case "share":
                    return await client.share(1, HELD, ())
                case _:
                    return await client.wait_ready(timeout_s=0.001)
        finally:
            await client.close()

    with nonsense.thrown_at("gradient worker"):
        asyncio.run(main())


@pytest.mark.parametrize("call", CALLS[1:])  # a start has its deadline
def test_a_state_that_there_is_not_is_an_error_at_once(call):
    raw = nonsense.as_json({"state": "dreaming"})
    with pytest.raises(TrainerError) as caught:
        asyncio.run(trained(call, raw, 200))
    assert "often enough" not in str(caught.value)


def test_shares_of_workers_that_were_not_asked_are_an_error():
    answer = {**DONE, "metrics": {"shares": [SHARE]}}
    with pytest.raises(TrainerError, match="cannot be understood"):
        asyncio.run(trained("train", nonsense.as_json(answer), 200))
