"""How long processes took to start, and slots to move."""

from __future__ import annotations

from libra_cli.core.evidence import Starts
from libra_cli.core.records import MoveRecord, SlotRecord
from libra_cli.core.types import Seconds, SlotId


class StartTimes:
    """Seconds until servers and trainers were ready, and in which slots that moved did nothing."""

    def __init__(self) -> None:
        self._began: dict[SlotId, Seconds] = {}
        self._waits: dict[str, _MeanOrNone] = {"serving": _MeanOrNone(), "training": _MeanOrNone()}
        self._idle: dict[tuple[str, str], _MeanOrNone] = {}

    def slot(self, row: SlotRecord) -> None:
        """Take in a slot's row; from ``starting`` until it serves or trains is its start.

        What is there at once was not started: the simulator begins with its processes up.
        """
        if row.state == "starting":
            self._began[row.slot] = row.since
        elif row.state == "waking":  # which is no start
            self._began.pop(row.slot, None)
        elif row.state in self._waits and row.slot in self._began:
            took_s = row.since - self._began.pop(row.slot)
            if took_s > 0:
                self._waits[row.state].add(took_s)

    def move(self, row: MoveRecord) -> None:
        """Take in a move; where the next process started beside the old one the slot was idle in
        the stop only.
        """
        if row.state != "done":
            return
        overlapped = row.phases[0].phase == "start"
        counted = ("stop",) if overlapped else ("drain", "stop", "start", "sync", "verify")
        idle_s = sum(
            one.ended_at - one.started_at
            for one in row.phases
            if one.phase in counted and one.ended_at is not None
        )
        self._idle.setdefault((row.from_role, row.to_role), _MeanOrNone()).add(idle_s)

    def seen(self) -> Starts:
        """Return the means of the starts so far."""
        return Starts(
            self._waits["serving"].value,
            self._waits["training"].value,
            to_training_s=self._of("rollout", "gradient"),
            to_rollout_s=self._of("gradient", "rollout"),
        )

    def _of(self, before: str, after: str) -> Seconds | None:
        mean = self._idle.get((before, after))
        return mean.value if mean else None


class _MeanOrNone:
    """A running mean; None before the first value."""

    def __init__(self) -> None:
        self._sum, self._number = 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._number = self._sum + value, self._number + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._number if self._number else None
