"""Telling the monitors of a run what is saved of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from queue import SimpleQueue
from typing import Any

from libra_cli.core.records import Record, RunRecord, StepRecord
from libra_cli.runtime.monitors.protocol import FINISH_S, MONITORS, Monitor, MonitoredRun


class Monitors:
    """The monitors of one run. Use as a context manager; ``on`` may be called from any thread."""

    def __init__(
        self, names: Sequence[str], run: MonitoredRun, *, note: Callable[[str], None]
    ) -> None:
        """``note`` gets a line for each monitor that fails.

        Raises:
            PluginError: there is no monitor of that name, or it cannot be imported.
        """
        self._run = run
        self._state = "failed"
        self._threads = [_MonitorThread(name, MONITORS.find(name), note) for name in names]

    def __enter__(self) -> Monitors:
        for thread in self._threads:
            thread.start()
            thread.tell(lambda monitor: monitor.start(self._run))
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.tell(lambda monitor: monitor.finish(self._state))
        for thread in self._threads:
            thread.close()

    def on(self, record: Record) -> None:
        """Take in one record that was saved; returns at once."""
        match record:
            case RunRecord():
                self._state = record.state
            case StepRecord(checkpoint=""):  # it comes again with the path of its checkpoint
                metrics = step_metrics(record)
                for thread in self._threads:
                    thread.tell(lambda monitor: monitor.log(record.step, metrics))
            case _:
                pass


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Every number that is known of a step, by name."""
    named: dict[str, Any] = asdict(record) | record.metrics | record.batch
    return {
        name: value
        for name, value in named.items()
        if name != "step" and isinstance(value, int | float) and isfinite(value)
    }


class _MonitorThread:
    """One monitor, made and called in a thread of its own, until it raises."""

    def __init__(self, name: str, make: Callable[[], Monitor], note: Callable[[str], None]) -> None:
        self._name = name
        self._make = make
        self._note = note
        self._calls: SimpleQueue[Callable[[Monitor], None] | None] = SimpleQueue()
        # A daemon: the process ends even if the monitor never returns.
        self._thread = threading.Thread(target=self._work, name=f"monitor {name}", daemon=True)

    def start(self) -> None:
        """Begin with what it is told."""
        self._thread.start()

    def tell(self, call: Callable[[Monitor], None]) -> None:
        """Have it called, after all that it was told before."""
        self._calls.put(call)

    def close(self) -> None:
        """Wait until it has heard everything, or for ``FINISH_S``."""
        self._calls.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._note(f"monitor {self._name} did not finish within {FINISH_S:.0f} s")

    def _work(self) -> None:
        try:
            monitor = self._make()
            while (call := self._calls.get()) is not None:
                call(monitor)
        except Exception as error:  # noqa: BLE001  somebody else's code; the run goes on without it
            self._note(f"monitor {self._name} is dropped: {type(error).__name__}: {error}")
