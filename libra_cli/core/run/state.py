"""The run itself: its phase, why it ends, and its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from libra_cli.core.events import PublishedVersion
from libra_cli.core.lifecycle import follow
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.types import Seconds


class Phase(StrEnum):
    """The phases of a run."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


P = Phase

TRANSITIONS: dict[Phase, dict[Phase, str]] = {
    P.STARTING: {
        P.RUNNING: "a server may be sent requests",
        P.DRAINING: "somebody asked to stop, or nothing can start",
    },
    P.RUNNING: {
        P.DRAINING: "the last step is done, somebody asked to stop, or the run cannot go on",
    },
    P.DRAINING: {
        P.STOPPING: "nothing is under way any more, its time is up, or it is to stop at once",
    },
    P.STOPPING: {
        P.ENDED: "no process is left",
    },
    P.ENDED: {},
}


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The fields of the run's row that never change."""

    run_id: str
    recipe: str
    controller_pid: int
    controller_started: float


@dataclass(frozen=True, slots=True)
class Resume:
    """The point that a run goes on from: a checkpoint, the ledger position in it, and the last
    trainer incarnation, so that no version of the continued run bears a name that was given before.

    ``records`` are what the run has written, in order: its observer begins with them, and plans and
    moves are numbered on.
    """

    checkpoint: str
    position: dict[str, Any]
    trainer_incarnation: int = 0
    records: Sequence[Record] = ()


class RunState:
    """The phase, the outcome (``finished | failed | stopped``) and when it began and ended."""

    def __init__(self, identity: RunIdentity, target_steps: int) -> None:
        self._identity = identity
        self._target_steps = target_steps
        self.phase = Phase.STARTING
        self.outcome = "finished"
        self.error = ""
        self.started_at: Seconds = 0.0
        self.ended_at: Seconds | None = None
        self._written: tuple[object, ...] = ()

    @property
    def going(self) -> bool:
        """Whether the run is not being wound down."""
        return self.phase is Phase.RUNNING or self.phase is Phase.STARTING

    def enter(self, phase: Phase) -> None:
        """Change the phase along ``TRANSITIONS``.

        Raises:
            IllegalMove: the table has no such change.
        """
        self.phase = follow(TRANSITIONS, self.phase, phase, "the run")

    def controlled_by(self, identity: RunIdentity) -> None:
        """Write the identity of another controller, which goes on with the run, into later rows."""
        self._identity, self._written = identity, ()

    def changed_row(
        self, step: int, published: PublishedVersion | None, waiting: str
    ) -> RunRecord | None:
        """Return the run's row; None if nothing in it has changed.

        ``waiting`` is what waits for what.
        """
        telling = (self.phase, self.outcome, self.error, published, waiting)
        if telling == self._written:
            return None
        self._written = telling
        state = self.outcome if self.phase is Phase.ENDED else str(self.phase)
        if self.phase in (Phase.DRAINING, Phase.STOPPING):
            state = "running"
        return RunRecord(
            id=self._identity.run_id,
            recipe=self._identity.recipe,
            state=state,
            started_at=self.started_at,
            ended_at=self.ended_at,
            target_steps=self._target_steps,
            step=step,
            version=published.version.step if published else 0,
            waiting=waiting,
            error=self.error,
            controller_pid=self._identity.controller_pid,
            controller_started=self._identity.controller_started,
        )
