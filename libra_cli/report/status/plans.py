"""What was decided, which plans were adopted, and what they gained: their part of a summary.

What each key means is told in ``summary``. Guarantee: what is not known is null. Limit: a gain is
observed over the few steps around the moves, so whatever else changed then is in it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from libra_cli.core.json_form import HIDDEN
from libra_cli.core.records import DecisionRecord, MoveRecord, PhaseRow, PlannedServer, PlanRecord
from libra_cli.core.types import Role
from libra_cli.report.status.parts import part_of
from libra_cli.runtime.store.reader import Reader

DECISIONS = 100
"""Number of decisions in a summary, the newest ones."""
PHASES = ("drain", "stop", "start", "sync", "verify", "join")
"""Phases of a move in the order they come in; which of them it has depends on the two roles."""


@dataclass(frozen=True, slots=True)
class PhasePart(PhaseRow):
    """A phase with its ``seconds`` until it ended, or until now."""

    seconds: float = 0.0


@dataclass(frozen=True)
class MovePart(MoveRecord):
    """A move, as it is ``now``, with what the plan gained that asked for it."""

    SHOWN: ClassVar[Mapping[str, str]] = {
        "from": "from_role",
        "to": "to_role",
        "predicted_gain": "predicted_gain",
        "observed_gain": "observed_gain",
    }
    now: float = field(metadata=HIDDEN)
    asked_by: PlanRecord | None = field(metadata=HIDDEN)

    @property
    def phases(self) -> tuple[PhasePart, ...]:
        return tuple(
            PhasePart(one.phase, one.started_at, one.ended_at, max(0.0, until - one.started_at))
            for one in super().phases
            for until in [self.now if one.ended_at is None else one.ended_at]
        )

    @property
    def predicted_gain(self) -> float | None:
        return self.asked_by.predicted_gain if self.asked_by else None

    @property
    def observed_gain(self) -> float | None:
        return self.asked_by.observed_gain if self.asked_by else None


def decisions(reader: Reader) -> list[DecisionRecord]:
    """The last ``DECISIONS`` times that the planner was asked, the newest last."""
    rows = reader.rows(DecisionRecord, order=f"at DESC LIMIT {DECISIONS}")
    return rows[::-1]


def moves(reader: Reader, *, now: float) -> list[MovePart]:
    """Every move, the newest last; a phase under way lasts till ``now``."""
    plans = {plan.plan: plan for plan in reader.plans()}
    return [
        part_of(MovePart, move, now=now, asked_by=plans.get(move.plan)) for move in reader.moves()
    ]


def changes(before: PlanRecord | None, after: PlanRecord) -> list[str]:
    """What the plan gives other slots to do than the one before, a few words a slot."""
    if before is None:
        return []
    old, new = _tasks(before), _tasks(after)
    slots = sorted(old.keys() | new.keys())
    pairs = [(slot, old.get(slot, _IDLE), new.get(slot, _IDLE)) for slot in slots]
    return [f"{slot} {_told(*then)} → {_told(*now)}" for slot, then, now in _shortened(pairs)]


_Task = tuple[str, str]
"""A role, and for a server its shape."""
_IDLE: _Task = (Role.IDLE, "")


def _tasks(plan: PlanRecord) -> dict[str, _Task]:
    tasks: dict[str, _Task] = dict.fromkeys(plan.train, (Role.TRAIN, ""))
    tasks |= dict.fromkeys(plan.gradient, (Role.GRADIENT, ""))
    tasks |= {slot: (Role.MODEL, model) for slot, model in plan.models}
    return tasks | {server.slot: (Role.ROLLOUT, _shape(server)) for server in plan.servers}


def _shape(server: PlannedServer) -> str:
    return f"{server.bucket}, TP {server.tensor_parallel}, {server.max_num_seqs} seats"


def _shortened(
    pairs: Iterable[tuple[str, _Task, _Task]],
) -> Iterable[tuple[str, _Task, _Task]]:
    """The slots that differ; a server's shape only where that is what differs."""
    for slot, then, now in pairs:
        if then[0] != now[0]:
            yield slot, (then[0], ""), (now[0], "")
        elif then != now:
            yield slot, then, now


def _told(role: str, shape: str) -> str:
    return f"{role} ({shape})" if shape else role


def phase_seconds(move: MovePart) -> Mapping[str, float]:
    """Return the seconds of each phase; a phase that came twice has the sum."""
    seconds: dict[str, float] = {}
    for one in move.phases:
        seconds[one.phase] = seconds.get(one.phase, 0.0) + one.seconds
    return seconds
