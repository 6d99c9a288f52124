"""What becomes of requests that take long: the client is given an id at once, and asks by it.

Answers are kept until newer ones push them out, so that a client whose connection was lost asks
again. A request that is still being worked on is never pushed out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, TypeAlias

from libra_cli.config.errors import LibraError

MOST_ANSWERS = 4096
"""Answers that are kept; a client asks for each within moments, so this is many clients' work."""
MOST_BYTES = 1 << 30
"""Bytes of answers that are kept, which are log-probabilities of whole batches; chosen."""
WAIT_S = 20.0
"""How long a question waits for its answer; the SDK's own limit is 45 seconds."""

Outcome: TypeAlias = bytes | dict[str, Any]
"""The bytes of a message, or JSON."""


class Futures:
    """The requests of all clients, by their ids."""

    def __init__(self, most: int = MOST_ANSWERS, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}
        self._owners: dict[str, str] = {}

    def begin(self, work: Coroutine[Any, Any, Outcome], *, owner: str = "") -> str:
        """Start the work of a request and return its id; ``owner`` is whose it is."""
        name = secrets.token_hex(12)
        self._owners[name] = owner
        self._tasks[name] = asyncio.create_task(work, name=f"tinker request {name}")
        self._push_out()
        return name

    def _push_out(self) -> None:
        """Keep as many of the newest answers as may be kept."""
        kept_bytes = 0
        done = [key for key, task in self._tasks.items() if task.done()]
        for place, key in enumerate(reversed(done)):
            kept_bytes += _size(self._tasks[key])
            if place >= self._most or kept_bytes > self._most_bytes:
                del self._tasks[key], self._owners[key]

    async def outcome(self, name: str, wait_s: float = WAIT_S) -> Outcome | None:
        """Return what came of a request, or None where it is not done after ``wait_s``.

        Raises:
            KeyError: there is no such request.
        """
        task = self._tasks[name]
        await asyncio.wait([task], timeout=wait_s)
        if not task.done():
            return None
        if task.cancelled():
            return {"error": "the request was cancelled", "category": "server"}
        error = task.exception()
        if error is None:
            return task.result()
        known = isinstance(error, LibraError | ValueError)
        return {"error": words_for_client(error), "category": "user" if known else "server"}

    def cancel(self, name: str) -> None:
        """End the work of a request, if there is such a one that is not done."""
        if name in self._tasks:
            self._tasks[name].cancel()

    def under_way(self) -> int:
        """Return the number of requests that are not done."""
        return sum(not task.done() for task in self._tasks.values())

    async def cancel_all(self, owner: str) -> None:
        """End the work of all requests of an owner, and wait until it has ended."""
        tasks = [self._tasks[name] for name, one in self._owners.items() if one == owner]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all work and wait until it has ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _size(task: asyncio.Task[Outcome]) -> int:
    """Return the bytes of a done request's answer; what is JSON is small."""
    if task.cancelled() or task.exception() is not None:
        return 0
    answer = task.result()
    return len(answer) if isinstance(answer, bytes) else 0


def words_for_client(error: BaseException) -> str:
    """Return what a client is told of an error, with the next thing to type where there is one."""
    if isinstance(error, LibraError):
        return f"{error} ({error.hint})" if error.hint else str(error)
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
