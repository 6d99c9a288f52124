"""Everything that a run says of itself: to its database, to who watches, to its monitors and logs.

The run directory is made here, and everything in it is open for as long as ``open_records`` is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.core.events import Event
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.types import Seconds
from libra_cli.runtime.driver import QUIET, describe
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.store.follower import NOTE
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import keep_recipe, make_private
from libra_cli.runtime.supervision.controller_log import controller_log
from libra_cli.runtime.supervision.quotations import quoted
from libra_cli.runtime.tasks.digests import keep_tasks


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what a run says, beside its database."""

    watch: Callable[[Record], None]
    """Called with every record that is saved."""
    note: Callable[[str], None]
    """Called with each line for a person, without secrets."""
    mask: Callable[[str], str]
    """Returns a text with its secrets masked."""


class RunRecords:
    """The rows of one run, of which its own is the first and the last to be written."""

    def __init__(self, journal: Journal, row: RunRecord, listeners: Listeners) -> None:
        self.journal = journal
        self.row = row
        self.mask = listeners.mask
        self._listeners = listeners

    def save(self, record: Record) -> None:
        """Write a record to the journal and show it; the run keeps its ``started_at``."""
        if isinstance(record, RunRecord):
            record = self.row = replace(record, started_at=self.row.started_at)
        self.journal.save(record)
        self._listeners.watch(record)

    def tell(self, at: Seconds, event: Event) -> None:
        """Write an event of the machine, unless a table of its own has it."""
        if not isinstance(event, QUIET):
            self.journal.event(at, type(event).__name__, describe(event))

    def note(self, text: str) -> None:
        """Show a line to a person, and keep it for whoever looks at the run later."""
        self._listeners.note(text)
        self.journal.event(time.time(), NOTE, {"text": self.mask(text)})

    def end(self, state: str, error: str, *, at: Seconds) -> None:
        error = quoted(error, self.mask)
        self.save(replace(self.row, state=state, error=error, waiting="", ended_at=at))


@contextmanager
def open_records(
    recipe: Recipe, run_dir: Path, row: RunRecord, told: Listeners
) -> Iterator[RunRecords]:
    """Make the run directory, this user's alone, and keep the recipe in it; its database and its
    monitors are open.

    Raises:
        LibraError: it cannot be made, or a monitor cannot begin.
    """
    monitored = MonitoredRun(run_dir.name, run_dir, recipe.model_dump(mode="json"), told.note)
    monitors = Monitors(recipe.run.monitors, monitored, samples=recipe.run.samples)

    def watch(record: Record) -> None:
        told.watch(record)
        monitors.on(record)

    make_private(run_dir)
    with (
        controller_log(run_dir, note=told.note, mask=told.mask),
        Journal(
            run_dir, on_error=lambda error: told.note(f"{error}; {error.hint}"), mask=told.mask
        ) as journal,
        monitors,
    ):
        keep_recipe(recipe, run_dir)
        keep_tasks(recipe, run_dir)
        yield RunRecords(journal, row, replace(told, watch=watch))
