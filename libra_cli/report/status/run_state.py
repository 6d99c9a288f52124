"""The parts of the summary on the run itself: its state, warnings and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_cli.core.records import RunRecord, SlotRecord, SyncRecord
from libra_cli.core.warnings.watch import KIND
from libra_cli.report.status.parts import part_of
from libra_cli.runtime.store.controller_process import controller_alive
from libra_cli.runtime.store.reader import Reader

LIVE = ("starting", "running")
"""The states of a run that has not ended."""


@dataclass(frozen=True, slots=True)
class RunPart:
    """The run itself; ``elapsed_s`` until now, or until it ended."""

    id: str
    state: str
    recipe: str
    directory: str
    started_at: float
    ended_at: float | None
    elapsed_s: float
    target_steps: int
    waiting: str
    error: str


def run_part(reader: Reader, *, now: float) -> RunPart:
    """The run itself, with a dead controller's silence put into words."""
    run = reader.run()
    state, ended_at, error, waiting = run.state, run.ended_at, run.error, run.waiting
    if state in LIVE and not controller_alive(reader):
        state, ended_at, waiting = "failed", reader.last_written() or run.started_at, ""
        error = error or _death(run, reader)
    return part_of(
        RunPart,
        run,
        state=state,
        directory=str(reader.run_dir),
        ended_at=ended_at,
        elapsed_s=(now if ended_at is None else ended_at) - run.started_at,
        waiting=waiting,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class WarningPart:
    """What a rule of ``core.warnings`` said of the steps; ``since`` is when, in ``text`` also what
    to type to look at trajectories."""

    rule: str
    since: float
    text: str


def warnings_of(reader: Reader) -> list[WarningPart]:
    """The warnings that still hold, the newest last."""
    return [
        WarningPart(note.subject, note.at, note.text.replace("RUN_DIR", str(reader.run_dir)))
        for note in reader.notes()
        if note.resolved_at is None and note.kind == KIND
    ]


def _death(run: RunRecord, reader: Reader) -> str:
    return (
        f"the controller (pid {run.controller_pid}) died without ending the run;"
        f" what it left on the hosts stops by itself, or now: libra stop {reader.run_dir}"
    )


def errors_of(
    reader: Reader, run: RunPart, slots: Sequence[SlotRecord], syncs: Sequence[SyncRecord]
) -> list[str]:
    """What a person must know of: the run's own error, what failed, notes that still hold."""
    errors = [run.error] if run.error else []
    errors += [
        f"node {node.node} ({node.host}): {node.state}: {node.detail or 'no reason given'}"
        for node in reader.nodes()
        if node.state in ("failed", "unreachable")
    ]
    errors += [
        f"slot {slot.slot}: failed: {slot.detail or 'no reason given'}"
        for slot in slots
        if slot.role == "failed" or slot.state == "failed"
    ]
    errors += [
        f"{note.kind} {note.subject}".rstrip() + f": {note.text}"
        for note in reader.notes()
        if note.resolved_at is None and note.kind != KIND
    ]
    return [*errors, *(sync.problem for sync in syncs if not sync.verified)]
