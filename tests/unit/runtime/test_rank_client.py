"""The controller's requests to a first rank, over links that are thin or dead."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgpack
import pytest
from aiohttp import web

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import Train
from libra_cli.core.types import LogRatios, WeightVersion
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.trainer.client import TrainerClient
from libra_cli.runtime.trainer.connection import Unreachable
from libra_cli.runtime.trainer.rank_client import RankClient

DEADLINE_S = 20.0
BODY = bytes(32 << 20)
"""More than sockets keep of what nobody reads."""

C = TypeVar("C", bound=RankClient)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def play(
    handler: Handler,
    scene: Callable[[C], Awaitable[None]],
    kind: type[C] = RankClient,  # type: ignore[assignment]
) -> None:
    async def whole() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        path = f"{directory}/rank.sock"
        await web.UnixSite(runner, path).start()
        client = kind(0, Endpoint(path), "t")
        try:
            await asyncio.wait_for(scene(client), DEADLINE_S)
        finally:
            await client.close()
            await runner.cleanup()

    with TemporaryDirectory() as directory:  # of a short name, as sockets need
        asyncio.run(whole())


def test_a_batch_may_take_longer_than_the_deadline_as_long_as_it_moves() -> None:
    async def slowly(request: web.Request) -> web.Response:
        size = 0
        while data := await request.content.read(1 << 20):
            size += len(data)
            await asyncio.sleep(0.02)
        return web.json_response({"size": size})

    async def scene(client: RankClient) -> None:
        began = asyncio.get_running_loop().time()
        answer = await client._call("POST", "/train", BODY, timeout_s=0.5)
        assert answer == {"size": len(BODY)}
        assert asyncio.get_running_loop().time() - began > 0.5

    play(slowly, scene)


def test_a_batch_that_does_not_move_any_more_is_given_up() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(DEADLINE_S)
        return web.Response()

    async def scene(client: RankClient) -> None:
        with pytest.raises(Unreachable, match="rank: /train"):
            await client._call("POST", "/train", BODY, timeout_s=0.2)
        with pytest.raises(Unreachable, match="rank: /health"):
            await client._call("GET", "/health", timeout_s=0.1)

    play(never, scene)


def test_an_answer_that_is_no_json_is_an_error_of_the_trainer() -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(body=b'{"state": \xff')

    async def scene(client: RankClient) -> None:
        with pytest.raises(TrainerError, match="codec can't decode"):
            await client._call("GET", "/health", timeout_s=5.0)

    play(nonsense, scene)


def log_ratios_after(answer: web.Response) -> LogRatios | None:
    """What a step brings whose trainer answers so when it is asked for them."""

    async def trainer(request: web.Request) -> web.Response:
        if request.path == "/log-ratios/3":
            return answer
        return web.json_response({"state": "done", "metrics": {"loss": 0.5}})

    found: list[LogRatios | None] = []

    async def scene(client: TrainerClient) -> None:
        done = await client.train(Train(0, 3, (), None, WeightVersion(0, 2)), (), patience_s=1.0)
        assert (done.step, done.metrics) == (3, {"loss": 0.5})
        found.append(done.log_ratios)

    play(trainer, scene, TrainerClient)
    return found[0]


def packed(branches: list[int], *values: float) -> bytes:
    told = {
        "branches": struct.pack(f"<{len(branches)}q", *branches),
        "values": struct.pack(f"<{len(values)}e", *values),
    }
    return bytes(msgpack.packb(told))


def test_log_ratios_come_with_the_step() -> None:
    told = packed([7, 1, 0, 2, 7, 1, 1, 1], 0.5, -1.0, 2.0)
    found = log_ratios_after(web.Response(body=told))
    assert found is not None
    assert found.by_branch() == {
        (7, 1, 0): struct.pack("<2e", 0.5, -1.0),
        (7, 1, 1): struct.pack("<e", 2.0),
    }


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=404, body=b'{"error": "none of that step"}'),
        web.Response(body=b""),
        web.Response(body=b"\xc1"),
        web.Response(body=msgpack.packb([1, 2])),
        web.Response(body=msgpack.packb({"branches": "x", "values": b""})),
        web.Response(body=packed([7, 1, 0, 3], 0.5)),
        web.Response(body=packed([7, 1, 0, -1, 7, 1, 1, 2], 0.5)),
        web.Response(body=packed([7, 1, 0], 0.5)),
    ],
    ids=range(8),
)
def test_a_step_is_done_whatever_is_wrong_with_its_log_ratios(answer: web.Response) -> None:
    assert log_ratios_after(answer) is None
