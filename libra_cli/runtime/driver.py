"""The loop of a run: an event in, actions out, each action a task whose result is the next event.

    outside finishes -> post(event) -> machine.handle(event, now) -> actions -> tasks -> outside

The driver is the only one that looks at the clock for the machine, and the only caller of
``handle``. It decides nothing. Whatever an action raises becomes the failure that the action may
end in (``core.actions``), and is logged and told. What ends in no failure, such as the proof that a
process is gone, is carried out again. Only an exception of the machine itself ends the run: what it
believes can no longer be trusted.

With a ``log`` every event is written before it is handled, and every action has a number, so that
another controller can go on where this one was killed.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import is_dataclass
from typing import Any, TypeAlias

from libra_cli.config.errors import LibraError
from libra_cli.core.actions import End, RuntimeAction, Save
from libra_cli.core.events import Event, ModelsUsed, ServerSampled
from libra_cli.core.records import Record
from libra_cli.core.run.machine import Machine
from libra_cli.core.types import Seconds, TrajectoryId
from libra_cli.runtime.adoption.run_log import RunLog
from libra_cli.runtime.supervision.background import is_cancelled
from libra_cli.runtime.supervision.failures import words_of
from libra_cli.runtime.supervision.quotations import with_quotations

Perform: TypeAlias = Callable[[RuntimeAction], Coroutine[Any, Any, Event | None]]
"""Carries out one action; what it returns is the next event of the machine."""

FAILED_PAUSE_S = 0.2
"""Seconds from an unexpected exception to its event: what is tried again at once must not spin."""
TRIES = 6
"""How often an action is tried that has no failure to end in."""
AGAIN_S = 1.0
"""Seconds until it is tried again the first time; the pause doubles with each failure."""

_log = logging.getLogger(__name__)


class Driver:
    """Feeds one machine its events and starts its actions, until it says that the run is over."""

    def __init__(
        self,
        machine: Machine,
        *,
        clock: Callable[[], Seconds],
        save: Callable[[Record], None],
        tell: Callable[[Seconds, Event], None],
        log: RunLog | None = None,
        mask: Callable[[str], str] = str,
    ) -> None:
        """Take a machine to drive; ``mask`` takes secrets out of what events quote."""
        self._mask = mask
        self._machine = machine
        self._log = log
        self._clock = clock
        self._save = save
        self._tell = tell
        #: Each with the number of the action that ended in it, or in nothing; None: give up.
        self._events: asyncio.Queue[tuple[Event | None, int] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def post(self, event: Event) -> None:
        """Queue an event from outside; call it from the loop's own thread."""
        self._events.put_nowait((event, 0))

    async def run(
        self,
        perform: Perform,
        *,
        first: Iterable[Event] = (),
        again: Callable[[], Iterable[tuple[int, RuntimeAction]]] = tuple,
    ) -> End:
        """Feed the machine until it says End; ``perform`` carries out what it wants.

        ``first`` is fed before anything that was posted; then what ``again`` names is carried out,
        which another controller was asked for.

        Raises:
            LibraError: something could not be stopped, whatever was tried.
            whatever the machine raised, which is a bug.
        """
        try:
            end = None
            for event in first:
                end = end or self._handle(event, 0, perform)
            for number, action in again():
                self._begin(number, action, perform)
            while end is None:
                came = await self._events.get()
                if came is None:
                    raise self._failure or RuntimeError("gave up without a failure")
                end = self._handle(*came, perform)
            return end
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handle(self, event: Event | None, number: int, perform: Perform) -> End | None:
        if event is not None:
            event = with_quotations(event, self._mask)
        now = self._clock()
        if self._log is not None:
            self._log.happened(event, number, now=now)
        if event is None:
            return None
        self._guard("telling an event", self._tell, now, event)
        for action in self._machine.handle(event, now=now):
            if isinstance(action, End):
                return action
            self._start(action, perform, now)
        if self._log is not None:
            self._log.settled()
        return None

    def _guard(self, what: str, call: Callable[..., None], *values: object) -> None:
        """Whoever only looks on cannot end the run."""
        try:
            call(*values)
        except Exception as error:  # noqa: BLE001  it is logged and told
            _log.exception("%s failed: %s", what, words_of(error))

    def _start(self, action: RuntimeAction | Save, perform: Perform, now: Seconds) -> None:
        if isinstance(action, Save):
            self._guard("saving a record", self._save, action.record)
            return
        number = self._log.asked(action, now=now) if self._log is not None else 0
        self._begin(number, action, perform)

    def _begin(self, number: int, action: RuntimeAction, perform: Perform) -> None:
        task = asyncio.create_task(self._carry_out(number, action, perform))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, number: int, action: RuntimeAction, perform: Perform) -> None:
        """Post what comes of the action, whatever it raises."""
        failures = 0
        while True:
            event, error = await _tried(action, perform)
            if error is None:
                break
            if not action.must_end:
                await asyncio.sleep(FAILED_PAUSE_S)
                event = action.failed(words_of(error))
                break
            failures += 1
            if failures == TRIES:
                self._give_up(action, error)
                break
            await asyncio.sleep(AGAIN_S * 2 ** (failures - 1))
        if event is not None or self._log is not None:
            self._events.put_nowait((event, number))

    def _give_up(self, action: RuntimeAction, error: BaseException) -> None:
        what = type(action).__name__
        self._failure = LibraError(f"{what} failed {TRIES} times; see controller.log")
        self._failure.__cause__ = error
        self._events.put_nowait(None)


async def _tried(
    action: RuntimeAction, perform: Perform
) -> tuple[Event | None, BaseException | None]:
    """Return what came of the action, or what it raised."""
    try:
        return await perform(action), None
    except (Exception, asyncio.CancelledError) as error:
        if is_cancelled():
            raise
        _log.exception("%s failed: %s", type(action).__name__, words_of(error))
        return None, error


_PLAIN = frozenset({bool, float, int, str})
"""Types that JSON has, too; most fields of events are of one of them."""
QUIET = (ServerSampled, ModelsUsed)
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
