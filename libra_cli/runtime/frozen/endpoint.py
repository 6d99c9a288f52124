"""Where the frozen models of a run answer: HTTP on the controller's loopback, with a token.

    /NAME/v1/...    goes to the server of that model which answers the fewest requests now

A request waits while no server of its model serves, and while its server answers as many as
``--max-num-seqs`` says: another that comes, or has less to do, then takes it over. One whose server
goes before it has answered is asked again of another: nothing of it was told to whoever asks. So is
one that a server fails on which is not well itself: vLLM answers 500 while its engine is dying.
Answers are vLLM's own, byte for byte, those in parts too.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Container, Sequence
from contextlib import nullcontext

import aiohttp
from aiohttp import web
from pydantic import SecretStr

from libra_cli.config.frozen_models import ModelsAddress
from libra_cli.runtime.frozen.server import FrozenServer
from libra_cli.runtime.processes.loopback import LoopbackServer

MAX_BODY_BYTES = 64 * 1024**2
_PASSED_ON = ("Content-Type", "Retry-After")
_REFUSED = 400
"""The status from which on an answer is none."""
_FAILED = 500
"""The status from which on an answer is the server's fault."""
_NO_LIMIT = aiohttp.ClientTimeout(total=None)
"""Whoever asks has a limit of its own, and is gone when that is over."""


class ModelsEndpoint:
    """The HTTP server that hands requests on to the servers of models."""

    def __init__(self, servers: Sequence[FrozenServer], changed: asyncio.Event) -> None:
        """``changed`` is set, and cleared again, when one of the servers serves or no longer, or
        has answered and so has a seat."""
        self._servers = servers
        self._changed = changed
        self._token = secrets.token_urlsafe(32)
        self._http: LoopbackServer | None = None

    async def start(self) -> ModelsAddress:
        """Listen on a free port of loopback; returns where."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{model}/{path:.*}", self._handle)
        self._http = LoopbackServer(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._http.start()
        return ModelsAddress(self._http.url, SecretStr(self._token))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            return web.json_response({"error": {"message": "another key"}}, status=401)
        name = http.match_info["model"]
        if name not in (known := [server.model for server in self._servers]):
            said = f"the run serves no model {name!r}, but {', '.join(dict.fromkeys(known))}"
            return web.json_response({"error": {"message": said}}, status=404)
        path = http.match_info["path"]
        if not is_below_v1(path):
            said = f"{path} is not there, but what is below /{name}/v1"
            return web.json_response({"error": {"message": said}}, status=404)
        body = await http.read()
        failed: set[FrozenServer] = set()
        while True:
            server = await self._serving(name, failed)
            with server.answering():
                if http.method == "POST" and not await self._has_seat(server, failed):
                    continue
                response = await self._tried(http, server, body)
            if response is not None:
                server.answered += http.method == "POST" and response.status < _REFUSED
                return response
            failed.add(server)

    async def _serving(self, name: str, failed: Container[FrozenServer]) -> FrozenServer:
        """The server of a model that has the least to do, once there is one; of those that have
        ``failed`` only if there is no other."""
        while True:
            if ready := self._ready(name):
                return min(ready, key=lambda one: (one in failed, one.running))
            await self._changed.wait()

    def _ready(self, name: str) -> list[FrozenServer]:
        """The servers of a model that take requests."""
        return [one for one in self._servers if one.model == name and one.takes_requests]

    async def _has_seat(self, server: FrozenServer, failed: Container[FrozenServer]) -> bool:
        """Wait for a seat on a server; return False once another would be the better choice."""
        while server.is_full:
            await self._changed.wait()
            others = [one for one in self._ready(server.model) if one not in failed]
            fewest = min((one.running for one in others), default=server.running)
            if not server.takes_requests or fewest + 1 < server.running:
                return False
        return True

    async def _tried(
        self, http: web.Request, server: FrozenServer, body: bytes
    ) -> web.StreamResponse | None:
        """Hand a request on; None if the server went before it had answered, or is about to."""
        session = server.session
        assert session is not None, "it was just chosen"
        url = f"http://server/{http.match_info['path']}"
        headers = {"Content-Type": http.headers.get("Content-Type", "application/json")}
        try:
            with server.seated() if http.method == "POST" else nullcontext():
                async with session.request(
                    http.method,
                    url,
                    params=http.query,
                    data=body or None,
                    headers=headers,
                    timeout=_NO_LIMIT,
                ) as answer:
                    if answer.status < _FAILED or await server.is_well():
                        return await handed_back(http, answer)
        except (aiohttp.ClientError, OSError):
            if http.transport is None or http.transport.is_closing():
                raise
        finally:
            if server.has_limit:
                wake(self._changed)
        await asyncio.sleep(0.1)  # it is told of a server's end a moment later
        return None


def wake(changed: asyncio.Event) -> None:
    """Let all that wait for a change look again, those first that have waited longest."""
    changed.set()
    changed.clear()


def is_below_v1(path: str) -> bool:
    """Whether a path below a model's own is one of its API, which begins with ``v1/``."""
    return path.startswith("v1/") and {".", ".."}.isdisjoint(path.split("/"))


async def handed_back(http: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Answer a request with what another server has answered, in parts if that does."""
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    if "event-stream" not in headers.get("Content-Type", ""):
        return web.Response(status=answer.status, body=await answer.read(), headers=headers)
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(http)
    try:
        async for part in answer.content.iter_any():
            await response.write(part)
        await response.write_eof()
    except (aiohttp.ClientError, OSError):  # a part was answered: it cannot be asked again
        if http.transport is not None:
            http.transport.close()
    return response
