"""The trainer or a gradient worker says anything: a TrainerError, never another exception."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import Accumulate, Train
from libra_cli.core.events import PublishedVersion, StepDone, TurnAdvantages
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.hosts.transport import Endpoint
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
STEP = {"loss": 0.5, "reward": None, "shares": [], "advantages": [[0, 1, [0.5, -1]]]}
ANSWERS = {
    "ready": {"published": VERSION},
    "train": {},
    "done": {"metrics": STEP},
    "published": VERSION,
    "accumulate": {},
    "accumulated": {"metrics": {}},
    "saved": {"path": "/checkpoints/1"},
    "checkpoint": {"error": "no space left"},
    "log_ratios": {"packed": b"\x82\xa8branches\xc4\x00\xa6values\xc4\x00"},
    "load": {"gap": 0.1},
    "share": {},
}
CALLS = ("wait_ready", "train", "wait_published", "accumulate", "wait_checkpoint", "checkpoint")


def saying(kind: Any, answers: Mapping[str, Any]) -> Any:
    """A client whose process gives these answers, by operation, whatever the order is."""

    class Told(kind):  # type: ignore[misc]
        async def _call(self, operation: str, order: Any, *, timeout_s: float | None = None) -> Any:
            return answers.get(operation, ANSWERS[operation])

    return Told(1, Endpoint("/nowhere.sock"), "token")


async def trained(call: str, answers: Mapping[str, Any]) -> Any:
    client = saying(TrainerClient, answers)
    match call:
        case "wait_ready":
            return await client.wait_ready(timeout_s=1.0)
        case "train":
            return await client.train(Train(1, 1, (), None, HELD), (), patience_s=0.0)
        case "accumulate":
            return await client.accumulate(Accumulate(1, 1, 1, ()), patience_s=0.0)
        case "checkpoint":
            return await client.checkpoint({}, patience_s=0.0)
        case _:
            return await getattr(client, call)(1, patience_s=0.0)


answers = nonsense.changed(ANSWERS).map(
    lambda one: {**ANSWERS, **one} if isinstance(one, dict) else ANSWERS
)


@given(call=st.sampled_from(CALLS), said=answers)
def test_whatever_the_trainer_says_is_read_or_its_error(call, said):
    with nonsense.thrown_at("trainer"):
        done = asyncio.run(trained(call, said))
        if isinstance(done, StepDone):
            assert all(one is None or abs(one) < float("inf") for one in done.metrics.values())


def test_what_a_critic_said_of_turns_comes_with_the_step():
    done = asyncio.run(trained("train", ANSWERS))
    assert done.advantages == (TurnAdvantages(0, 1, (0.5, -1.0)),)
    assert done.metrics == {"loss": 0.5, "reward": None}


@given(call=st.sampled_from(["wait_ready", "load", "share"]), said=answers)
def test_whatever_a_gradient_worker_says_is_read_or_its_error(call, said):
    async def main() -> Any:
        client = saying(WorkerClient, said)
        match call:
            case "load":
                published = PublishedVersion(HELD, 10, 0.0)
                return await client.load("/v", published, timeout_s=0.0)
            case "share":
                return await client.share(1, HELD, ())
            case _:
                return await client.wait_ready(timeout_s=0.001)

    with nonsense.thrown_at("gradient worker"):
        asyncio.run(main())


def test_shares_of_workers_that_were_not_asked_are_an_error():
    said = {**ANSWERS, "done": {"metrics": {"shares": [SHARE]}}}
    with pytest.raises(TrainerError, match="cannot be understood"):
        asyncio.run(trained("train", said))
