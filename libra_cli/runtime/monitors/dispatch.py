"""Tells the monitors of a run what is saved of it, each monitor in a thread of its own."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from queue import Empty, Full, Queue
from typing import Any

from libra_cli.config.errors import PluginError
from libra_cli.config.secrets import SECRET_NAME
from libra_cli.core.metric_names import evaluation_metrics, step_metrics
from libra_cli.core.records import EvaluationRecord, Record, RunRecord, StepRecord
from libra_cli.plugins.finding import find
from libra_cli.runtime.monitors.between_steps import BetweenSteps
from libra_cli.runtime.monitors.protocol import FINISH_S, MONITORS, QUEUE, Monitor, MonitoredRun
from libra_cli.runtime.monitors.samples import Decoder, SampledTrajectory


class Monitors:
    """The monitors of one run. Use as a context manager; ``on`` may be called from one thread."""

    def __init__(
        self, monitors: Mapping[str, Mapping[str, Any]], run: MonitoredRun, *, samples: int = 0
    ) -> None:
        """``monitors`` are names with their arguments; ``jsonl`` is always one of them. ``samples``
        trajectories of each step are shown. ``run.note`` gets a line for each that fails.

        Raises:
            PluginError: there is no monitor of that name, it cannot be imported, or it does not
                take its arguments.
        """
        run = replace(run, note=partial(_note_safely, run.note))
        self._run = run
        self._state = "failed"
        named: Mapping[str, Mapping[str, Any]] = {"jsonl": {}} | dict(monitors)
        makers = {name: _maker(name, arguments) for name, arguments in named.items()}
        self._threads = [_MonitorThread(name, make, run.note) for name, make in makers.items()]
        self._listeners: dict[type, list[_MonitorThread]] = {}
        for thread, make in zip(self._threads, makers.values(), strict=True):
            for kind in getattr(make.func, "records", ()):
                self._listeners.setdefault(kind, []).append(thread)
        asked = any(hasattr(make.func, "log_samples") for make in makers.values())
        self._between = BetweenSteps(run.id, samples if asked else 0)
        self._decode = Decoder(run.directory / "model")

    def __enter__(self) -> Monitors:
        for thread in self._threads:
            thread.start()
            thread.tell("start", self._run)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.tell("finish", self._state)
        give_up = time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.close(give_up)

    def on(self, record: Record) -> None:
        """Take in one record that was saved; returns at once."""
        self._between.saw(record)
        for thread in self._listeners.get(type(record), ()):
            thread.tell("saw", record)
        match record:
            case RunRecord():
                self._state = record.state
            case StepRecord(checkpoint=""):  # it comes again with the path of its checkpoint
                self._step(record)
            case EvaluationRecord(state="finished"):
                for thread in self._threads:
                    thread.tell("log_evaluation", record.step, evaluation_metrics(record))
            case _:
                pass

    def _step(self, record: StepRecord) -> None:
        between, sampled = self._between.take(record.step)
        metrics = between | step_metrics(record)
        samples = [SampledTrajectory(one, self._decode) for one in sampled]
        for thread in self._threads:
            thread.tell("log", record.step, metrics)
            if samples:
                thread.tell("log_samples", record.step, samples)


def _maker(name: str, arguments: Mapping[str, Any]) -> partial[Monitor]:
    """What makes the monitor, once it is sure that it can be made."""
    make = find(MONITORS, name)
    for package in getattr(make, "packages", ()):
        if not _is_installed(package):
            raise PluginError(
                f"monitor {name!r} needs the package {package}, which is not installed",
                hint=f"pip install 'libra-rl[{name}]', or take it out of run.monitors",
            )
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        known = ", ".join(inspect.signature(make).parameters) or "none"
        raise PluginError(f"run.monitors: {name}: {error}", hint=f"it takes: {known}") from error
    return partial(make, **arguments)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what it is a part of is not there
        return False


class _MonitorThread:
    """One monitor, made and called in a thread of its own, until it raises."""

    def __init__(self, name: str, make: Callable[[], Monitor], note: Callable[[str], None]) -> None:
        self._name = name
        self._make = make
        self._note = note
        self._calls: Queue[tuple[str, tuple[Any, ...]]] = Queue(QUEUE)
        self._lost = 0
        # A daemon: the process ends even if the monitor never returns.
        self._thread = threading.Thread(target=self._work, name=f"monitor {name}", daemon=True)
        self._over = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def tell(self, method: str, *arguments: object) -> None:
        """Have its method called, if it has it, after all that it was told before."""
        if self._over.is_set():
            return
        try:
            self._calls.put_nowait((method, arguments))
        except Full:
            self._lost += 1
            if self._lost == 1:
                self._note(f"monitor {self._name} is slower than the run: it is not told all")
            if method == "finish":
                self._make_room(method, arguments)

    def _make_room(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Queue the end of the run in place of the oldest call that waits."""
        with contextlib.suppress(Empty):
            self._calls.get_nowait()
        self._calls.put_nowait((method, arguments))

    def close(self, give_up: float) -> None:
        """Wait until it has heard everything, or until ``give_up`` of the monotonic clock."""
        self._thread.join(max(0.0, give_up - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"monitor {self._name} did not finish within {FINISH_S:.0f} s")
        if self._lost:
            self._note(f"monitor {self._name} was not told of {self._lost} things")

    def _work(self) -> None:
        try:
            monitor = self._make()
            method = ""
            while method != "finish":
                method, arguments = self._calls.get()
                call = getattr(monitor, method, None)
                if call is not None:
                    call(*arguments)
        except BaseException as error:  # noqa: BLE001  somebody else's code; the run goes on
            self._note(f"monitor {self._name} is dropped: {type(error).__name__}: {error}")
        finally:
            self._over.set()


def _note_safely(note: Callable[[str], None], line: str) -> None:
    """Show a line without what the environment keeps secret, and without passwords of URLs."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) > 3:
            line = line.replace(value, "***")
    note(re.sub(r"://[^/@\s]+@", "://***@", line))
