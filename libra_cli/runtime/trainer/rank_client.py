"""What the HTTP sides of the trainer and of a gradient worker have in common: rank 0 of each."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from libra_cli.config.errors import TrainerError
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.http import describe, open_session
from libra_cli.runtime.trainer.connection import Conflict, Unreachable

POLL_S = 0.25
CALL_TIMEOUT_S = 120.0


class RankClient:
    """A first rank, seen from the controller."""

    who = "rank"

    def __init__(self, incarnation: int, endpoint: Endpoint, token: str) -> None:
        self.incarnation = incarnation
        self._session = open_session(endpoint, token)

    async def close(self) -> None:
        """Drop the connections; the process itself is not touched."""
        await self._session.close()

    async def _call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        if self._session.closed:
            raise TrainerError(f"the {self.who} is being stopped")
        deadline = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, path, data=body, timeout=deadline) as reply:
                raw = await reply.read()
                status = reply.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.who}: {path}: {describe(error)}") from error
        answer: dict[str, Any] = json.loads(raw) if raw[:1] == b"{" else {}
        if status >= 400:
            detail = answer.get("error") or raw[:300].decode(errors="replace")
            kind = Conflict if status == 409 else TrainerError
            raise kind(f"{self.who}: {path} answered {status}: {detail}")
        return answer

    async def _ready(self, *, timeout_s: float) -> dict[str, Any]:
        """Its health, once every rank is there.

        Raises:
            TrainerError: a rank failed, or not ready in time.
        """
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            try:
                health = await self._call("GET", "/health", timeout_s=CALL_TIMEOUT_S)
            except Unreachable:
                health = {"state": "starting"}
            if health["state"] == "failed":
                raise TrainerError(str(health.get("error")))
            if health["state"] == "ready":
                return health
            await asyncio.sleep(POLL_S)
        raise TrainerError(f"the {self.who} is not ready after {timeout_s:.0f} s")

    async def stop(self) -> None:
        """Ask every rank to leave; the agent makes sure that they do."""
        await self._call("POST", "/stop", timeout_s=5.0)
