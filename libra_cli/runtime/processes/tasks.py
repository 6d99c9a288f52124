"""Tasks that make sense only while a process lives, such as waiting for its start or for a step.

When a process ends, its host's agent reports it at once, long before a request to it times out. So
tasks are kept by the process's name, and whoever hears of its end cancels them. A cancelled task
then returns None, since the end has its own event. A cancellation of the *caller* that waits for a
task is passed on as usual.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.core.events import Event
from libra_cli.runtime.supervision.background import is_cancelled


class ProcessTasks:
    """The work under way on each process, by a name of the owner's choice."""

    def __init__(self) -> None:
        self._work: defaultdict[str, set[asyncio.Task[Event]]] = defaultdict(set)

    async def during(
        self, name: str, work: Coroutine[Any, Any, Event], failed: Callable[[str], Event]
    ) -> Event | None:
        """Do the work; a LibraError becomes ``failed``. None if the process ended first."""
        task: asyncio.Task[Event] = asyncio.create_task(work)
        self._work[name].add(task)
        try:
            return await task
        except LibraError as error:
            return failed(str(error))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return None
        finally:
            self._work[name].discard(task)

    def end(self, name: str) -> None:
        """Cancel the work on a process that has ended, or is about to."""
        for task in self._work[name]:
            task.cancel()
