"""Tasks that nobody awaits, none of which can fail unseen.

    start   work that has an end: an exception is logged and given to ``failed``, which may make an
            event of it
    keep    work without an end: an exception is logged, and the work begins again after a pause

An error that is logged here is also told to the user, once for each place it comes from
(``runtime.supervision.controller_log``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from libra_cli.runtime.supervision.failures import words_of

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Before work begins again; the pause doubles while the work fails sooner than it lasts."""

_log = logging.getLogger(__name__)


class Background:
    """The background tasks of one owner, which cancels them with ``cancel`` or ``close``.

    Use it from one event loop.
    """

    def __init__(self, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._first_pause_s = first_pause_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self,
        what: str,
        work: Coroutine[Any, Any, object],
        *,
        failed: Callable[[Exception], None] | None = None,
    ) -> asyncio.Task[None]:
        """Begin the work; ``failed`` hears of an exception. Awaiting the task raises nothing."""
        task = self._add(_once(what, work, failed))
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        return task

    def keep(
        self, what: str, work: Callable[[], Coroutine[Any, Any, object]]
    ) -> asyncio.Task[None]:
        """Have the work done until it returns or is cancelled, again after each exception."""
        return self._add(_again_and_again(what, work, self._first_pause_s))

    def _add(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Return when every task of now has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Ask every task to end, without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel every task but the one that calls, and return when they have ended."""
        self._tasks.discard(asyncio.current_task())
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _once(
    what: str, work: Coroutine[Any, Any, object], failed: Callable[[Exception], None] | None
) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001  it is logged and told
        _log.exception("%s failed: %s", what, words_of(error))
        if failed is not None:
            failed(error)


async def _again_and_again(
    what: str, work: Callable[[], Coroutine[Any, Any, object]], first_pause_s: float
) -> None:
    pause_s = first_pause_s
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception as error:  # noqa: BLE001  it is logged and told
            if time.monotonic() - began > pause_s:
                pause_s = first_pause_s
            _log.exception("%s failed and begins again: %s", what, words_of(error))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not only something it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
