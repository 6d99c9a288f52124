"""What the HTTP sides of the trainer and of a gradient worker have in common: rank 0 of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from libra_cli.config.errors import TrainerError
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.http import describe, open_session
from libra_cli.runtime.supervision.answers import reads_answers
from libra_cli.runtime.trainer.connection import Conflict, Unreachable

POLL_S = 0.25
CALL_TIMEOUT_S = 120.0
"""Without a byte; reading a large batch may take the first rank so long."""
PIECE_BYTES = 1 << 16
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""aiohttp's own; what passes without a byte is counted here."""


class RankClient:
    """A first rank, seen from the controller."""

    who = "rank"

    def __init__(self, incarnation: int, endpoint: Endpoint, token: str) -> None:
        self.incarnation = incarnation
        self._session = open_session(endpoint, token)

    async def close(self) -> None:
        """Drop the connections; the process itself is not touched."""
        await self._session.close()

    @reads_answers(TrainerError)
    async def _call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """The answer, as JSON; see ``_bytes``."""
        raw = await self._bytes(method, path, body, timeout_s=timeout_s)
        answer: dict[str, Any] = json.loads(raw) if raw[:1] == b"{" else {}
        return answer

    async def _bytes(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> bytes:
        """The answer; no ``timeout_s`` may pass without a byte of the body leaving, or after it.

        A batch may take long over a thin link.
        """
        if self._session.closed:
            raise TrainerError(f"the {self.who} is being stopped")
        try:
            status, raw = await self._sent(method, path, body, timeout_s)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.who}: {path}: {describe(error)}") from error
        if status >= 400:
            said = json.loads(raw) if raw[:1] == b"{" else {}
            detail = said.get("error") or raw[:300].decode(errors="replace")
            kind = Conflict if status == 409 else TrainerError
            raise kind(f"{self.who}: {path} answered {status}: {detail}")
        return raw

    async def _sent(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        headers = {} if body is None else {"Content-Length": str(len(body))}
        async with asyncio.timeout(timeout_s) as limit:

            async def pieces(whole: bytes) -> AsyncIterator[bytes]:
                for start in range(0, len(whole), PIECE_BYTES):
                    yield whole[start : start + PIECE_BYTES]
                    limit.reschedule(loop.time() + timeout_s)

            data = None if body is None else pieces(body)
            async with self._session.request(
                method, path, data=data, headers=headers, timeout=NO_TIMEOUT
            ) as reply:
                return reply.status, await reply.read()

    @reads_answers(TrainerError)
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
