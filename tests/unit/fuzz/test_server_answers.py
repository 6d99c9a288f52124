"""A rollout server says anything: the turn or the call fails, and nothing else does."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import Generate
from libra_cli.core.events import PublishedVersion, ServerSampled, TurnFailed, TurnGenerated
from libra_cli.core.types import GroupId, TrajectoryId, WeightVersion
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.stream import Stream
from libra_cli.runtime.rollout.connection import Sampling
from libra_cli.runtime.vllm.client import ERRORS, ServerClient
from tests.unit.fuzz import nonsense

VERSION = WeightVersion(1, 2)
PUBLISHED = PublishedVersion(VERSION, 10, 0.0)
ACTION = Generate(
    request=1,
    trajectory=TrajectoryId(GroupId(0), 0),
    slot="a/0",
    incarnation=1,
    prompt_ids=array("i", [1, 2]),
    max_tokens=3,
    cache_key=VERSION,
    priority=0,
)
TURN = {
    "finish_reason": "stop",
    "token_ids": [1, 2, 3],
    "logprobs": [-0.1, -0.2, -0.3],
    "spans": [["e1v2", 0, 3]],
}
PROBE = {"prompt_logprobs": [-0.1, -0.2]}
LOAD = {"done": True, "loads": 1, "different": [], "untraced": [], "paused_s": 0.1}
COUNTERS = {
    "running": 1,
    "waiting": 0,
    "kv_use": 0.5,
    "prefix_queries": 3,
    "prefix_hits": 1,
    "preemptions": 0,
    "generated_tokens": 9,
    "queue_time_s_sum": 0.1,
    "queue_time_s_count": 2,
}
FACTS = {"version": "0.11", "kv_tokens": 10}


class Mute:
    """A transport to nobody."""

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


class AnyStream:
    """A stream on which every call has the same answer."""

    closed = False

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def begin(self, operation: str, order: Any) -> tuple[int, asyncio.Future[Any]]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(self.answer)
        return 1, future

    def tell(self, operation: str, order: Any) -> int:
        return 1

    def forget(self, call: int) -> None: ...

    def close(self) -> None: ...


def client_of(stream: Any) -> ServerClient:
    client = ServerClient("a/0", 1, Endpoint("/nowhere.sock"), "token")
    client._stream = stream
    return client


def generated(answer: Any, **sampling: Any) -> TurnGenerated | TurnFailed:
    async def main() -> TurnGenerated | TurnFailed:
        told = Sampling(1.0, 1.0, (), **sampling)
        return await client_of(AnyStream(answer)).generate(ACTION, told)

    return asyncio.run(main())


def test_a_turn_as_it_should_be_is_taken():
    assert isinstance(generated(TURN), TurnGenerated)


def test_a_token_beyond_the_vocabulary_fails_the_turn():
    largest = max(cast("list[int]", TURN["token_ids"]))
    assert isinstance(generated(TURN, vocabulary=largest + 1), TurnGenerated)
    assert isinstance(generated(TURN, vocabulary=largest), TurnFailed)


@given(answer=nonsense.changed(TURN))
def test_a_turn_is_generated_or_failed(answer):
    with nonsense.thrown_at("server turns"):
        event = generated(answer)
        if isinstance(event, TurnGenerated):
            assert sum(event.token_ids) >= 0
            assert abs(sum(event.logprobs)) < float("inf")
            assert len(event.token_ids) == len(event.logprobs) <= ACTION.max_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": [-0.1, float("nan"), -0.3]},
        {"logprobs": [-0.1, float("inf"), float("-inf")]},
        {"logprobs": [-0.1]},
        {"token_ids": [1, 2, -3]},
        {"token_ids": [1, 2, 2**40]},
        {"token_ids": [1] * 4, "logprobs": [-0.1] * 4, "spans": [["e1v2", 0, 4]]},
        {"spans": [["e1v2", -3, 0], ["e1v2", 3, 3]]},
        {"spans": [["e1v2", 0, 5], ["e1v2", 5, 3]]},
    ],
    ids=repr,
)
def test_numbers_that_cannot_be_right_fail_the_turn_and_name_the_server(wrong):
    event = generated({**TURN, **wrong})
    assert isinstance(event, TurnFailed)
    assert (event.slot, event.refused) == ("a/0", False)


@given(
    answer=st.one_of(*map(nonsense.changed, (PROBE, LOAD, COUNTERS, FACTS))),
    operation=st.sampled_from(["check", "load", "probe", "facts", "sample", "wait_ready"]),
)
def test_whatever_else_a_server_says_is_read_or_its_error(answer, operation):
    async def main() -> Any:
        client = client_of(AnyStream(answer))
        match operation:
            case "load":
                return await client.load("/v", PUBLISHED, timeout_s=0.0)
            case "probe":
                return await client.probe([1, 2, 3], PUBLISHED)
            case "wait_ready":
                return await client.wait_ready(timeout_s=0.0)
            case _:
                return await getattr(client, operation)()

    with nonsense.thrown_at("server calls"):
        answered = asyncio.run(main())
        if isinstance(answered, ServerSampled):
            assert answered.kv_use < float("inf")


MESSAGES = [
    [0, "done", TURN],
    [0, "failed", "out of memory"],
    [0, "refused", "the prompt is too long"],
    [5, "done", {}],
]


@given(
    data=st.lists(
        nonsense.broken(st.one_of(*map(nonsense.changed, MESSAGES)).map(nonsense.as_msgpack)),
        max_size=3,
    ).map(b"".join)
)
def test_whatever_bytes_come_a_call_is_answered_or_fails(data):
    async def main() -> None:
        stream = Stream("a/0", "token", ERRORS, silence_s=1.0)
        stream._transport = Mute()  # type: ignore[assignment]
        _, future = stream.begin("check", {})
        stream.data_received(data)
        stream.connection_lost(None)
        assert future.done()
        assert future.exception() is None or isinstance(future.exception(), ServerError)

    with nonsense.thrown_at("server bytes"):
        asyncio.run(main())


def test_what_a_server_says_of_a_refusal_cannot_reach_a_terminal_as_it_is():
    async def main() -> str:
        stream = Stream("a/0", "token", ERRORS, silence_s=1.0)
        stream._transport = Mute()  # type: ignore[assignment]
        _, future = stream.begin("check", {})
        stream.data_received(nonsense.as_msgpack([0, "refused", "\x1b]0;x\x07" + "y" * 10**6]))
        return str(future.exception())

    said = asyncio.run(main())
    assert "\x1b" not in said
    assert len(said) < 1000
