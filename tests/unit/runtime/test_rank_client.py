"""The controller's requests to a first rank, over links that are thin or dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory

import pytest
from aiohttp import web

from libra_cli.config.errors import TrainerError
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.trainer.connection import Unreachable
from libra_cli.runtime.trainer.rank_client import RankClient

DEADLINE_S = 20.0
BODY = bytes(32 << 20)
"""More than sockets keep of what nobody reads."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def play(handler: Handler, scene: Callable[[RankClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        path = f"{directory}/rank.sock"
        await web.UnixSite(runner, path).start()
        client = RankClient(0, Endpoint(path), "t")
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
