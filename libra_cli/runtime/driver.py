"""The loop of a run: an event in, actions out, each action a task whose result is the next event.

    outside finishes -> post(event) -> machine.handle(event, now) -> actions -> tasks -> outside

The driver is the only one that looks at the clock for the machine, and the only caller of
``handle``. It decides nothing. An action that raises is a bug in ``libra_cli.runtime``, where
failures are events: the run is stopped at once and ``run`` raises it, so that nothing limps on
unseen.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import is_dataclass
from typing import Any, TypeAlias

from libra_cli.core.actions import End, RuntimeAction, Save
from libra_cli.core.events import Event, ServerSampled, StopRequested
from libra_cli.core.machine import Machine
from libra_cli.core.records import Record
from libra_cli.core.types import Seconds, TrajectoryId

Perform: TypeAlias = Callable[[RuntimeAction], Coroutine[Any, Any, Event | None]]
"""Carries out one action; what it returns is the next event of the machine."""

GIVE_UP_S = 120.0
"""How long a run may take to stop after a bug, before it is left to whoever owns the hosts."""


class Driver:
    """Runs one machine to its end."""

    def __init__(
        self,
        machine: Machine,
        *,
        clock: Callable[[], Seconds],
        save: Callable[[Record], None],
        tell: Callable[[Seconds, Event], None],
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._save = save
        self._tell = tell
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Event | None]] = set()
        self._failure: BaseException | None = None

    def post(self, event: Event) -> None:
        """Something happened outside. Call it from the loop's own thread."""
        self._events.put_nowait(event)

    async def run(self, perform: Perform) -> End:
        """Feed the machine until it says End; ``perform`` carries out what it wants.

        Raises:
            whatever an action raised, after everything was stopped.
        """
        try:
            while True:
                event = await self._events.get()
                if event is None:
                    raise self._failure or RuntimeError("gave up without a failure")
                now = self._clock()
                self._tell(now, event)
                for action in self._machine.handle(event, now=now):
                    if isinstance(action, End):
                        return self._ended(action)
                    self._start(action, perform)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, end: End) -> End:
        if self._failure is not None:
            raise self._failure
        return end

    def _start(self, action: RuntimeAction | Save, perform: Perform) -> None:
        if isinstance(action, Save):
            self._save(action.record)
            return
        task = asyncio.create_task(perform(action))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Event | None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            event = task.result()
            if event is not None:
                self.post(event)
        elif self._failure is None:
            self._failure = error
            self.post(StopRequested(at_once=True, reason=f"a bug in libra: {error!r}"))
            loop = asyncio.get_running_loop()
            loop.call_later(GIVE_UP_S, self._events.put_nowait, None)


_PLAIN = frozenset({bool, float, int, str})
"""Types of JSON, which most fields have."""
QUIET = (ServerSampled,)
"""Events that have a table of their own and are not worth a second row."""


def describe(value: Any) -> dict[str, object]:
    """An event (or a dataclass in it) as JSON-able fields; token arrays become their lengths."""
    # dataclasses.fields would make its list anew for every event.
    return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}


def _plain(value: Any) -> object:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, array):
        return len(value)
    if is_dataclass(value) and not isinstance(value, type):
        return str(value) if type(value).__str__ is not object.__str__ else describe(value)
    if isinstance(value, TrajectoryId):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value
