"""Kills the vLLM server of a run in the middle, and reads what every slot did."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from libra_cli.api import LoadedRun
from libra_cli.config.errors import StateError
from libra_cli.core.records import SlotRecord
from libra_cli.report.html.slot_rows import slot_rows
from libra_cli.runtime.store.reader import Reader
from tests.cluster.processes import Role, processes_of
from tests.gallery.facts import Lane, ServerKill, SlotMove, Timeline


@dataclass
class Killer:
    """Kills one server of the newest run in a folder once half of its steps are done."""

    place: Path
    say: Callable[[str], None]
    slot: str = ""
    at: float = 0.0
    """When, in seconds since the epoch; 0: not yet."""

    def look(self) -> None:
        """Kill it if it is time; called once a second while the run goes on."""
        for database in self.place.glob("runs/*/libra.db"):
            # A run that begins has no rows yet.
            with suppress(StateError), Reader(database.parent) as reader:
                self._look(reader)

    def _look(self, reader: Reader) -> None:
        run = reader.run()
        if self.at or run.step < run.target_steps // 2:
            return
        for slot in reader.slots():
            pid = _server_of(reader, slot) if slot.state == "serving" else None
            if pid is not None:
                self.slot, self.at = slot.slot, time.time()
                os.kill(pid, signal.SIGKILL)
                self.say(f"  killed the server of {slot.slot}, pid {pid}, after step {run.step}")
                return


def _server_of(reader: Reader, slot: SlotRecord) -> int | None:
    """Return the pid of the slot's server, which must be a process of this run."""
    name = f"server-{slot.slot.rpartition('/')[2]}"
    known = (row.pid for row in reader.processes() if row.process == name and row.node == slot.node)
    found = processes_of(reader.run().id, known)
    return next((one.pid for one in found if one.role == Role.SERVER), None)


def timeline_of(run: LoadedRun, killed: Killer) -> Timeline:
    """What every slot of a finished run did while it took steps.

    Raises:
        ValueError: no server was killed, or the one that was never served again.
    """
    began, seconds = run.steps[0].started_at, run.steps[-1].ended_at - run.steps[0].started_at
    with Reader(run.directory) as reader:
        rows = slot_rows(reader, reader.steps(), began=began, seconds=seconds)
        again = [
            state.since
            for state in reader.slot_history()
            if state.slot == killed.slot and state.state == "serving" and state.since > killed.at
        ]
    if not again:
        raise ValueError("no server was killed, or it never served again")
    return Timeline(
        lanes=[
            Lane(
                slot=row.name,
                states=[(round(start, 1), round(end, 1), name) for start, end, name in row.states],
            )
            for row in rows
        ],
        moves=[
            SlotMove(
                slot=move.slot,
                to=move.to_role,
                started_at=round(move.started_at - began, 1),
                ended_at=round((move.ended_at or 0.0) - began, 1),
            )
            for move in run.moves
            if move.state == "done"
        ],
        kill=ServerKill(
            slot=killed.slot,
            at=round(killed.at - began, 1),
            serves_again_at=round(min(again) - began, 1),
        ),
    )
