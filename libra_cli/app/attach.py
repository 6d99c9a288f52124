"""``libra attach`` and ``libra run --detach``: a run that goes on without a terminal, and its view.

A detached controller is a process in a session of its own, so that no terminal can end it; what it
prints goes to ``console.log`` in its run directory. Whoever attaches only reads the journal.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import StateError
from libra_cli.core.records import Record
from libra_cli.report.status.run_state import LIVE, run_part
from libra_cli.runtime.store.controller_process import controller_alive
from libra_cli.runtime.store.follower import ADOPTED, JournalFollower
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import CONSOLE_LOG, make_run_dir
from libra_cli.runtime.store.schema import DATABASE

POLL_S = 0.5
"""Seconds between two looks at the journal: progress is drawn twice a second."""
PASSED = ("RunStarted", ADOPTED)
"""The events with which a controller begins, once its hosts are ready for it."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What ``app.run`` calls with each record and each line for a person."""

    watch: Callable[[Record], None]
    note: Callable[[str], None]


def started_at(run_dir: Path) -> float:
    """When the run began, in seconds since the epoch.

    Raises:
        StateError: there is no such run.
    """
    with Reader(run_dir) as reader:
        return reader.run().started_at


def attach(run_dir: Path, told: Watched) -> str:
    """``libra attach``: tell of a run until its controller has ended; returns the run's last state.

    A run that has finished still makes its models and its report, and clears its hosts.

    Raises:
        StateError: there is no such run.
    """
    follower = JournalFollower()
    while _look(run_dir, follower, told) in LIVE or _is_ending(run_dir):
        time.sleep(POLL_S)
    return _look(run_dir, follower, told)  # what was written before it was gone


def _is_ending(run_dir: Path) -> bool:
    with Reader(run_dir) as reader:
        return controller_alive(reader)


def _look(run_dir: Path, follower: JournalFollower, told: Watched) -> str:
    with Reader(run_dir) as reader:
        for record in follower.records(reader):
            told.watch(record)
        for line in follower.notes(reader):
            told.note(line)
        return run_part(reader, now=time.time()).state


class DetachedRun:
    """A controller that was started in a session of its own."""

    def __init__(self, run_dir: Path, argv: Sequence[str]) -> None:
        """Start it: a command that runs in ``run_dir``."""
        make_run_dir(run_dir)
        self._run_dir = run_dir
        self._before = self._passed()
        self._log = run_dir / CONSOLE_LOG
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        log = os.open(self._log, flags, 0o600)
        self._began = self._log.stat().st_size
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_started(self, told: Watched) -> int | None:
        """Tell of it until its hosts are ready; returns its exit status if it ends before."""
        follower = JournalFollower()
        while (status := self._process.poll()) is None:
            if self._writes():
                _look(self._run_dir, follower, told)
                if self._passed() > self._before:
                    return None
            time.sleep(POLL_S)
        if self._writes():
            _look(self._run_dir, follower, told)
        return status

    def said(self) -> str:
        """Return what this controller has written to ``console.log`` so far, stderr included."""
        with self._log.open("rb") as file:
            file.seek(self._began)
            return file.read().decode(errors="replace")

    def _writes(self) -> bool:
        """Whether the journal is its own already, and not that of a controller before it."""
        try:
            with Reader(self._run_dir) as reader:
                return reader.run().controller_pid == self.pid
        except StateError:
            return False

    def _passed(self) -> int:
        """The number of the last event with which a controller of this run began."""
        if not (self._run_dir / DATABASE).is_file():
            return 0
        with Reader(self._run_dir) as reader:
            began = (number for kind in PASSED for number, _ in reader.events(kind))
            return max(began, default=0)
