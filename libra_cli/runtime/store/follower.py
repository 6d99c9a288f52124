"""Follows a run by its journal: what has changed since it was looked at last, for ``Progress``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from libra_cli.core.records import (
    DecisionRecord,
    EvaluationRecord,
    MoveRecord,
    NodeRecord,
    NoteRecord,
    PlanRecord,
    ProcessRecord,
    Record,
    RunRecord,
    SlotRecord,
    StepRecord,
    SyncRecord,
)
from libra_cli.runtime.store.reader import Reader

NOTE = "Note"
"""The event under which the journal keeps a line that a run has told its user."""
ADOPTED = "RunAdopted"
"""The event with which a controller begins that goes on where another was killed."""
_WHOLE = (
    RunRecord,
    NodeRecord,
    ProcessRecord,
    SlotRecord,
    PlanRecord,
    MoveRecord,
    EvaluationRecord,
    NoteRecord,
)
_GROWING = {SyncRecord: "served_at", DecisionRecord: "at", StepRecord: "ended_at"}
"""Records of which there are ever more, and the column by which the newer ones are found."""


@dataclass(slots=True)
class JournalFollower:
    """Knows which records and notes it has given out, so that it gives each once."""

    _seen: dict[tuple[object, ...], Record] = field(default_factory=dict)
    _newest: dict[type[Record], float] = field(default_factory=dict)
    _note: int = 0

    def records(self, reader: Reader) -> list[Record]:
        """Records that are new or other than before; at first all of them."""
        found: list[Record] = [row for kind in _WHOLE for row in reader.rows(kind)]
        for kind, column in _GROWING.items():
            since = self._newest.get(kind, 0.0)
            rows: list[Any] = reader.rows(kind, f"{column} >= ?", (since,), order=column)
            self._newest[kind] = max((getattr(row, column) for row in rows), default=since)
            found += rows
        return [row for row in found if self._is_news(row)]

    def notes(self, reader: Reader) -> list[str]:
        """The lines that the run has told since, in order."""
        events = reader.events(NOTE, self._note)
        self._note = max((number for number, _ in events), default=self._note)
        return [str(told.get("text", "")) for _, told in events]

    def _is_news(self, row: Record) -> bool:
        key = (row.TABLE, *(getattr(row, name) for name in row.KEY))
        before = self._seen.get(key)
        self._seen[key] = row
        return before != row
