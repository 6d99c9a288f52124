"""Calls into environments: so many at once, each for so long, and abandoned after that.

A call is a task of the event loop. One that takes longer than its limit is left to itself: it keeps
neither its place nor its caller, and what it returns later is dropped. Until then its ``CallLine``
is hung, and the next call of that episode has to wait for it, or to do without.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.core.types import Seconds
from libra_cli.runtime.supervision.background import is_cancelled

T = TypeVar("T")


@dataclass(slots=True)
class CallLine:
    """The calls of one episode, never two at once."""

    last: asyncio.Task[Any] | None = None
    """The newest call; the next one starts after it is done."""
    waited_s: Seconds = 0.0
    """Seconds that calls waited until they might begin."""

    @property
    def hung(self) -> bool:
        """Whether a call is under way; between two calls, one that was abandoned."""
        return self.last is not None and not self.last.done()


class Calls:
    """The calls of all episodes of one environment. It belongs to one event loop."""

    def __init__(self, concurrency: int, limit_s: Seconds) -> None:
        """Allow ``concurrency`` calls at once, abandoned ones not counted, each for ``limit_s``."""
        self._permits = asyncio.Semaphore(concurrency)
        self.limit_s = limit_s
        self.hung = 0
        """The number of abandoned calls that have not returned."""

    async def run(self, line: CallLine, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make a call when one more may run, and abandon it if it takes too long.

        Raises:
            TimeoutError: it took longer than ``limit_s``.
        """
        asked = time.monotonic()
        async with self._permits:
            line.waited_s += time.monotonic() - asked
            async with asyncio.timeout(self.limit_s):
                return await self.run_on(line, call)

    async def run_on(self, line: CallLine, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make a call now, however long it takes, and abandon it if this is cancelled.

        Raises:
            EnvironmentBroken: the episode was forgotten meanwhile, with its calls.
        """
        task = line.last = asyncio.create_task(call())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not is_cancelled():
                raise EnvironmentBroken("the episode was forgotten meanwhile") from None
            raise
        finally:
            if not task.done():  # it takes too long, or the trajectory was cancelled
                self.hung += 1
                task.add_done_callback(self._came_back)

    async def wait(self, line: CallLine) -> None:
        """Wait for a call that may hang, for as long as a call may take.

        Raises:
            TimeoutError: it has not returned.
        """
        if line.last is not None and line.hung:
            _, hung = await asyncio.wait({line.last}, timeout=self.limit_s)
            if hung:
                raise TimeoutError

    def _came_back(self, task: asyncio.Task[Any]) -> None:
        self.hung -= 1
        if not task.cancelled():
            task.exception()  # nobody waits for it, and asyncio would log that
