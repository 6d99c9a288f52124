"""Ctrl-C and SIGTERM: what they end depends on what the run is at.

starting    the task that starts it; a second one only tells so
at work     its machine, which stops with a checkpoint; at once for a second one
leaving     what is written after the run
releasing   nothing any more

Commands that hold hosts without a run (``libra eval``, ``tinker``) are at their start until they
release them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TypeAlias

from libra_cli.core.events import StopRequested
from libra_cli.runtime.driver import Driver

Interrupted: TypeAlias = Callable[[bool], object]
"""Called for each signal; True from the second on: at once."""


STOPPING = "already stopping"
CLEARING = f"{STOPPING}: the hosts are being cleared"


class Interrupts:
    """The signals that end a run; each method says what they do from now on."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._count = 0
        self._call: Interrupted = lambda at_once: None

    def end_task(self) -> None:
        """Catch the signals; the first cancels the task that calls this, and no other does."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)

        def call(at_once: bool) -> None:
            self._note(STOPPING if at_once else "stopping")
            if not at_once:
                task.cancel()

        self._call = call

    def stop_machine(self, driver: Driver) -> None:
        """Have the first interrupt stop the machine gently, and any later one at once."""

        def call(at_once: bool) -> None:
            gently = "stopping: checkpoint, drain, stop (once more: at once)"
            self._note("stopping at once" if at_once else gently)
            driver.post(StopRequested(at_once, "asked for"))

        self._call = call

    def break_off(self, work: asyncio.Task[None]) -> None:
        """Have every interrupt from now on cancel ``work``."""
        self._call = lambda at_once: work.cancel()

    def end_nothing(self, why: str) -> None:
        """Have every interrupt from now on only tell ``why`` it ends nothing."""
        self._call = lambda at_once: self._note(why)

    def _interrupted(self) -> None:
        self._count += 1
        self._call(self._count > 1)
