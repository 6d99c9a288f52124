"""The controller's end of the stream to a rollout server, whose engine is fake."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import Generate
from libra_cli.core.events import PublishedVersion, TurnFailed, TurnGenerated
from libra_cli.core.types import TrajectoryId, VersionSpan, WeightVersion
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.rollout.connection import Sampling, ServerUnreachable
from libra_cli.runtime.vllm import client as client_module
from libra_cli.runtime.vllm.client import ServerClient
from tests.fake_engine import TOKEN, FakeEngine, serve

SAMPLING = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=())
DEADLINE_S = 20.0


def turn(request: int, max_tokens: int) -> Generate:
    return Generate(
        request=request,
        trajectory=TrajectoryId(0, request),
        slot="n/0",
        incarnation=3,
        prompt_ids=array("i", [1, 2]),
        max_tokens=max_tokens,
        cache_key=WeightVersion(1, 1),
        priority=0,
    )


def play(scene: Callable[[ServerClient, FakeEngine], Awaitable[Any]], *, token: str = TOKEN) -> Any:
    async def whole() -> Any:
        engine = FakeEngine()
        client = ServerClient("n/0", 3, Endpoint(serve(engine)), token)
        try:
            return await asyncio.wait_for(scene(client, engine), DEADLINE_S)
        finally:
            await client.close()
            await asyncio.sleep(0)  # the transport closes its socket when the loop goes round

    return asyncio.run(whole())


def test_turns_come_back_as_events_each_to_who_asked():
    async def scene(client: ServerClient, _: FakeEngine) -> list[Any]:
        return await asyncio.gather(*(client.generate(turn(n, n), SAMPLING) for n in range(1, 9)))

    for asked, done in enumerate(play(scene), 1):
        assert isinstance(done, TurnGenerated)
        assert done.request == asked
        assert done.token_ids == array("i", [7] * asked)
        assert done.logprobs == array("f", [-0.5] * asked)
        assert done.spans == (VersionSpan(1, 0, asked),)
        assert done.finish_reason == "length"


def test_an_abort_ends_a_turn_with_the_tokens_it_has():
    async def scene(client: ServerClient, engine: FakeEngine) -> Any:
        asked = asyncio.create_task(client.generate(turn(5, 0), SAMPLING))
        await client.check()  # by then the server has the turn
        await client.abort(6)  # nobody's
        await client.abort(5)
        return await asked

    done = play(scene)
    assert isinstance(done, TurnGenerated)
    assert done.finish_reason == "abort"
    assert done.newest == done.cache_key


def test_who_stops_waiting_for_a_turn_has_it_aborted():
    async def scene(client: ServerClient, engine: FakeEngine) -> list[str]:
        asked = asyncio.create_task(client.generate(turn(5, 0), SAMPLING))
        await client.check()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await client.check()
        return engine.aborted

    assert len(play(scene)) == 1


def test_who_stops_waiting_for_a_sample_has_it_aborted_before_its_adapter_is_let_go_of():
    async def scene(client: ServerClient, engine: FakeEngine) -> tuple[list[str], list[str]]:
        for name in ("a", "b"):
            await client.add_adapter(name, "{}", b"tensors")
        order = {"prompt_ids": array("i", [1, 2]).tobytes(), "max_tokens": 0, "adapter": "a"}
        asked = asyncio.create_task(client.sample_tokens(order))
        await client.check()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await client.remove_adapter("a")
        with pytest.raises(ServerError, match="no adapter a"):
            await client.remove_adapter("a")
        return engine.aborted, list(engine.adapters)

    aborted, adapters = play(scene)
    assert (len(aborted), adapters) == (1, ["b"])


def test_a_turn_on_a_connection_that_is_lost_has_failed_and_the_next_call_connects_again():
    async def scene(client: ServerClient, engine: FakeEngine) -> Any:
        asked = asyncio.create_task(client.generate(turn(5, 0), SAMPLING))
        await client.check()
        assert client._stream is not None
        client._stream.close()
        done = await asked
        await client.check()
        return done

    done = play(scene)
    assert isinstance(done, TurnFailed)
    assert (done.refused, done.unreachable) == (False, True)
    assert "the connection was closed" in done.reason


def test_a_wrong_token_and_a_closed_client_are_unreachable_servers():
    async def refused(client: ServerClient, _: FakeEngine) -> None:
        with pytest.raises(ServerUnreachable, match="n/0"):
            await client.check()

    async def closed(client: ServerClient, _: FakeEngine) -> None:
        await client.close()
        with pytest.raises(ServerUnreachable, match="being stopped"):
            await client.check()

    play(refused, token="another")
    play(closed)


@pytest.mark.parametrize(
    ("unproved", "partly", "said"),
    [
        ({}, False, None),
        ({"different": ["q is another"]}, False, "q is another"),
        ({"different": ["q is another"]}, True, "q is another"),
        ({"untraced": ["q was not found"]}, False, "cannot prove what it holds"),
        ({"untraced": ["q was not found"]}, True, None),
    ],
)
def test_the_probe_decides_for_what_is_not_traced_and_never_for_what_differs(
    unproved, partly, said
):
    async def scene(client: ServerClient, engine: FakeEngine) -> float:
        engine.unproved |= unproved
        published = PublishedVersion(WeightVersion(1, 1), bytes=0, at=0.0)
        return await client.load("/v", published, timeout_s=5.0, partly=partly)

    if said is None:
        assert play(scene) == 0.1
    else:
        with pytest.raises(ServerError, match=said):
            play(scene)


@pytest.mark.parametrize("scores", [[-0.5, -1.5], [-0.5], [-0.5, math.nan], [-0.5, -math.inf]])
def test_a_probe_has_a_number_for_every_token_but_the_first(scores):
    async def scene(client: ServerClient, engine: FakeEngine) -> list[float]:
        engine.scores = scores
        return await client.probe([1, 2, 3], PublishedVersion(WeightVersion(1, 1), 0, 0.0))

    if math.isfinite(sum(scores)) and len(scores) == 2:
        assert play(scene) == scores
    else:
        with pytest.raises(ServerError, match=f"the probe has {len(scores)} log-probabilities"):
            play(scene)


def test_a_refusal_is_told_from_a_failure():
    async def scene(client: ServerClient, _: FakeEngine) -> Any:
        empty = replace(turn(1, 4), prompt_ids=array("i"))
        return await client.generate(empty, SAMPLING)

    done = play(scene)
    assert isinstance(done, TurnFailed)
    assert (done.refused, done.unreachable) == (True, False)
    assert "no prompt" in done.reason


def test_a_server_whose_host_is_out_of_reach_as_it_starts_sleeps_or_wakes_is_asked_again():
    async def scene(client: ServerClient, _: FakeEngine) -> set[str]:
        asked, lost = client._call, {"generate", "facts", "sleep", "wake"}

        async def call(operation: str, order: Any, **limits: Any) -> Any:
            answer = await asked(operation, order, **limits)
            if operation in lost:  # it was carried out, and nobody has heard of it
                lost.remove(operation)
                raise ServerUnreachable("n/0: the connection was closed")
            return answer

        client._call = call  # type: ignore[method-assign]
        await client.wait_ready(timeout_s=DEADLINE_S)
        assert (await client.facts()).version
        await client.sleep()
        await client.wake()
        return lost

    assert play(scene) == set()


def test_an_order_to_a_server_that_stays_away_is_given_up_and_so_is_one_of_a_closed_client(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_S", 0.0)
    asked = []

    async def scene(client: ServerClient, _: FakeEngine) -> None:
        async def call(operation: str, order: Any, **limits: Any) -> Any:
            asked.append(operation)
            raise ServerUnreachable("n/0: the connection was closed")

        client._call = call  # type: ignore[method-assign]
        with pytest.raises(ServerUnreachable):
            await client._repeat("facts", {}, timeout_s=0.6)
        tries = len(asked)
        await client.close()
        with pytest.raises(ServerUnreachable):
            await client._repeat("wake", {}, timeout_s=DEADLINE_S)
        assert (tries > 1, len(asked) - tries) == (True, 1)

    play(scene)
