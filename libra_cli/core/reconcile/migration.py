"""A move: one slot changing role, as data.

``LIFECYCLE`` is the whole story: what ends each phase, how long it may take, and where the move
goes when that fails. The order of the phases depends on whether the next process may start beside
the old one::

    in turn     drain -> stop -> start -> sync -> verify -> join     the slot is idle in between
    overlapping start -> sync -> verify -> drain -> stop -> join     it never is

Guarantee: a move that fails leaves the slot where it was, or gives it back to what it did before,
or, if that fails too, frees it; its process is gone before anything else starts on its GPUs. Limit:
a phase is seen by the events that come; what took how long is as exact as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from json import dumps
from typing import NamedTuple

from libra_cli.core.reconcile.desired_state import Served
from libra_cli.core.records import MoveRecord
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Role, Seconds, SlotId

DONE, FAILED = "done", "failed"


class MigrationPhase(StrEnum):
    DRAIN = "drain"
    STOP = "stop"
    START = "start"
    SYNC = "sync"
    VERIFY = "verify"
    JOIN = "join"


class PhaseRule(NamedTuple):
    """The end of a phase: well by ``cause``, within ``deadline_s`` seconds, else ``otherwise``."""

    cause: str
    deadline_s: Seconds
    otherwise: str


P = MigrationPhase

LIFECYCLE: dict[MigrationPhase, PhaseRule] = {
    P.DRAIN: PhaseRule(
        "the last turn or share of the old process has ended",
        150.0,
        "turns are aborted and go on elsewhere from their tokens; the trainer computes the share",
    ),
    P.STOP: PhaseRule(
        "no process of the old one is left on the node, or it sleeps",
        600.0,
        "the move fails; nothing starts on the slot before its host has said that all is gone",
    ),
    P.START: PhaseRule(
        "the new process is healthy",
        1800.0,
        "the new process is stopped; the slot is given back",
    ),
    P.SYNC: PhaseRule(
        "it has loaded the newest version",
        600.0,
        "the new process is stopped; the slot is given back",
    ),
    # Told after the fact, by the reply that ends ``sync`` too, whose deadline counts for both.
    P.VERIFY: PhaseRule(
        "it agrees with the trainer on the probe",
        600.0,
        "the new process is stopped; the slot is given back",
    ),
    P.JOIN: PhaseRule(
        "it has its first request or its first share has been used",
        60.0,
        "the move is done all the same: there is no work for it now",
    ),
}


@dataclass(slots=True)
class SlotMigration:
    """The move of one slot from a role to another.

    ``served`` is what its server was before, if it had one.
    """

    number: int
    plan: int
    slot: SlotId
    before: Role
    after: Role
    #: Whether the next process starts beside the old one.
    overlap_start: bool
    served: Served | None
    started_at: Seconds
    phases: list[tuple[MigrationPhase, Seconds]] = field(default_factory=list)
    #: Of the new process's assignment, once it has been started.
    incarnation: int | None = None
    #: Requests inside the slot's server, summed over time, when the new process was started.
    request_s: Seconds = 0.0
    state: str = ""
    ended_at: Seconds | None = None
    detail: str = ""

    @property
    def phase(self) -> MigrationPhase | None:
        """The phase under way; None before the first."""
        return self.phases[-1][0] if self.phases else None

    def enter(self, phase: MigrationPhase, *, now: Seconds) -> bool:
        """Begin a phase, unless it is under way or over; returns whether it has begun."""
        if any(seen is phase for seen, _ in self.phases):
            return False
        self.phases.append((phase, now))
        self.state = str(phase)
        return True

    def end(self, state: str, *, now: Seconds, detail: str = "") -> None:
        self.state, self.ended_at, self.detail = state, now, detail

    @property
    def timer(self) -> TimerKey:
        """The key of the deadline of the phase under way."""
        return TimerKey(TimerOwner.MOVE, (str(self.number), str(self.phase)))

    def record(self) -> MoveRecord:
        ends = [began for _, began in self.phases[1:]] + [self.ended_at]
        rows = [[phase, began, end] for (phase, began), end in zip(self.phases, ends, strict=False)]
        return MoveRecord(
            move=self.number,
            plan=self.plan,
            slot=self.slot,
            from_role=self.before,
            to_role=self.after,
            state=self.state or "queued",
            started_at=self.started_at,
            ended_at=self.ended_at,
            phases_json=dumps(rows),
            detail=self.detail,
        )
