"""A model of a run that judges with a 7, for environments that ask it with the run's key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import SecretStr

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.frozen_models import ModelsAddress, environment_at
from libra_cli.runtime.processes.loopback import LoopbackServer

TOKEN = "the key of this run"


class AskedModel:
    """Answers on a port of this process's loopback."""

    def __init__(self) -> None:
        self.address: ModelsAddress
        self.called: list[str] = []
        """By which host and port each request with the key has asked for it."""

    async def _answer(self, http: web.Request) -> web.Response:
        if http.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "another key"}}, status=401)
        self.called.append(http.host)
        message = {"role": "assistant", "content": "score: 7"}
        choices = [{"message": message, "finish_reason": "stop"}]
        return web.json_response({"choices": choices, "usage": {"total_tokens": 3}})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[AskedModel]:
        app = web.Application()
        app.router.add_post("/judge/v1/chat/completions", self._answer)
        server = LoopbackServer(app)
        await server.start()
        self.address = ModelsAddress(server.url, SecretStr(TOKEN))
        try:
            yield self
        finally:
            await server.close()

    def judged(self, directory: Path, nodes: tuple[str, ...]) -> EnvironmentSpec:
        """The environment of a question that it judges, in workers on these nodes."""
        rows = directory / "rows.jsonl"
        rows.write_text('{"prompt": [{"role": "user", "content": "a?"}]}\n' * 8)
        judge: dict[str, Any] = {"served": "judge", "prompt": "{answer}", "scale": [0, 10]}
        spec = {
            "name": "dataset",
            "tasks": str(rows),
            "args": {"reward": "judge", "judge": judge},
            "workers": {"processes": 4, "nodes": nodes},
            "tool_timeout_s": 60,
        }
        return environment_at(EnvironmentSpec.model_validate(spec), self.address)
