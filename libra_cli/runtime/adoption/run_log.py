"""Keeps what a controller that comes after this one must know, and goes through it again.

``RunLog`` writes every event before it is handled, and a snapshot with every checkpoint, or when
there are more entries than a replay should take. ``replay`` gives the machine of the last
snapshot the events since, each at its own time: ``handle`` is pure, so it is then in the state in
which the controller was killed, and its actions are the ones that were asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from libra_cli.config.errors import StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import Accumulate, Checkpoint, End, RuntimeAction, Save, Train
from libra_cli.core.events import CheckpointSaved, Event, NodeBack, StepDone
from libra_cli.core.records import Record
from libra_cli.core.run.machine import Machine
from libra_cli.core.types import Seconds
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.adoption.snapshot import load_machine, save_machine
from libra_cli.runtime.hosts.cluster import KeptCluster
from libra_cli.runtime.hosts.upload import package
from libra_cli.runtime.store.event_codec import decode, encode, pack, unpack
from libra_cli.runtime.store.event_log import EventLog, read_events

MOST_BYTES = 64 * 2**20
"""Bytes of entries after which a snapshot is made without a checkpoint: some 10^5 turns, which are
replayed in seconds."""


def _must_be_same(recipe: Recipe) -> dict[str, Any]:
    """What a replay that is to do the same needs. Secrets are masked, and may change."""
    said = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
    return {"code": package()[1], "recipe": said}


class RunLog:
    """Writes one machine's events, each with the number of the action that ended in it."""

    def __init__(
        self,
        log: EventLog,
        machine: Machine,
        remembered: RunMemory,
        cluster: Callable[[], KeptCluster],
    ) -> None:
        """Begin with a snapshot due; ``cluster`` gives the state of the hosts for every one."""
        self._log = log
        self._machine = machine
        self._memory = remembered
        self._cluster = cluster
        self._due = True

    def happened(self, event: Event | None, number: int, *, now: Seconds) -> None:
        """Call it before the event is handled; ``number`` is of the action that ended in it."""
        asked = self._memory.action(number)
        self._log.append(pack([now, number, encode(event, asked)]))
        self._memory.happened(event, number)
        if isinstance(event, StepDone):
            self._log.sync()
        elif isinstance(event, CheckpointSaved | NodeBack):
            self._due = True

    def asked(self, action: RuntimeAction, *, now: Seconds) -> int:
        """Call it before an action is begun; returns its number."""
        if isinstance(action, (Train, Accumulate, Checkpoint)):
            self._log.sync()
        return self._memory.ask(action, now=now)

    def outdated(self) -> None:
        """A host has changed: where processes listen is written with the next snapshot."""
        self._due = True

    def settled(self) -> None:
        """Call it between two events: it is the moment for a snapshot, if one is due."""
        log = self._log
        due = self._due or log.entries_bytes > max(MOST_BYTES, log.snapshot_bytes)
        if due and not log.is_beginning:
            self._due = False
            head = _must_be_same(self._machine.recipe) | {"cluster": asdict(self._cluster())}
            log.begin(json.dumps(head).encode(), save_machine(self._machine, self._memory))

    def close(self) -> None:
        """Close the log and leave it there, for a controller that goes on with the run."""
        self._log.close()

    def remove(self) -> None:
        """Remove the log of a run that has ended."""
        self._log.remove()


class ReplayedEvent(NamedTuple):
    """An event that was handled again, and the records that it led to."""

    at: Seconds
    event: Event
    saved: Sequence[Record]


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A run as its controller left it when it was killed."""

    machine: Machine
    memory: RunMemory
    cluster: KeptCluster
    happened: Sequence[ReplayedEvent]
    """The events since the snapshot, in order."""

    @property
    def until(self) -> Seconds:
        """When the last event was handled; 0 if there was none."""
        return self.happened[-1].at if self.happened else 0.0


def replay(run_dir: Path, recipe: Recipe, token: str) -> ReplayedRun:
    """Bring a run to where it was.

    Raises:
        StateError: it cannot be: why.
    """
    logged = read_events(run_dir, token)
    head, mine = json.loads(logged.head), _must_be_same(recipe)
    changed = [what for what in mine if head.get(what) != mine[what]]
    if changed:
        raise StateError(f"the {' and the '.join(changed)} changed since the controller was killed")
    machine, remembered = load_machine(logged.snapshot, recipe)
    try:
        happened = _replayed(machine, remembered, logged.entries)
        return ReplayedRun(machine, remembered, KeptCluster(**head["cluster"]), happened)
    except Exception as error:
        raise StateError(
            f"its events cannot be replayed: {type(error).__name__}: {error}"
        ) from error


def _replayed(
    machine: Machine, remembered: RunMemory, entries: Sequence[bytes]
) -> list[ReplayedEvent]:
    happened = []
    for entry in entries:
        now, number, values = unpack(entry)
        event = decode(values, remembered.action(number))
        remembered.happened(event, number)
        if event is None:
            continue
        saved: list[Record] = []
        for action in machine.handle(event, now=now):
            if isinstance(action, Save):
                saved.append(action.record)
            elif not isinstance(action, End):
                remembered.ask(action, now=now)
        happened.append(ReplayedEvent(now, event, saved))
    return happened
