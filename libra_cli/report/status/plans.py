"""What was decided, which plans were adopted, and what they gained: their part of a summary.

What each key means is told in ``summary``. Guarantee: what is not known is null. Limit: a gain is
observed over the few steps around the moves, so whatever else changed then is in it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TypedDict

from libra_cli.core.records import DecisionRecord, MoveRecord, PlanRecord
from libra_cli.core.types import Role
from libra_cli.report.status.parts import part_of
from libra_cli.runtime.store.reader import Reader

DECISIONS = 100
"""Number of decisions in a summary, the newest ones."""
PHASES = ("drain", "stop", "start", "sync", "verify", "join")
"""Phases of a move in the order they come in; which of them it has depends on the two roles."""


class PhasePart(TypedDict):
    """One phase of a move; ``seconds`` until it ended, or until now."""

    phase: str
    began: float
    ended: float | None
    seconds: float


MovePart = TypedDict(
    "MovePart",
    {
        "move": int,
        "plan": int,
        "slot": str,
        "from": str,
        "to": str,
        "state": str,
        "phases": list[PhasePart],
        "predicted_gain": float | None,
        "observed_gain": float | None,
        "started_at": float,
        "ended_at": float | None,
        "detail": str,
    },
)


class PlannedServerPart(TypedDict):
    """One server of a plan: its slot and its shape."""

    slot: str
    bucket: str
    tensor_parallel: int
    max_num_seqs: int
    up_to_tokens: int


class OptionPart(TypedDict):
    """A placement in words and its predicted seconds a step; null where it does not fit."""

    layout: str
    rollout_s: float | None
    train_s: float | None
    step_s: float | None


class RunnerUpPart(TypedDict):
    """The placement that was not chosen, and why."""

    option: OptionPart
    why_not: str


class BindingPart(TypedDict):
    """The constraint that binds, and a few words on where."""

    constraint: str
    words: str


class PredictedPart(TypedDict):
    """A step as predicted; the mean of the next few is expected within the interval."""

    step_s: float | None
    low_s: float | None
    high_s: float | None
    source: str
    corrected: bool


class ExplanationPart(TypedDict):
    """The keys that ``core.explanation.Explanation`` has as JSON."""

    move: bool
    why_not: str
    today: OptionPart
    chosen: OptionPart
    runner_up: RunnerUpPart | None
    binds_today: BindingPart
    binds: BindingPart
    predicted: PredictedPart
    cost_s: float
    payback_steps: float | None
    horizon_steps: float | None


class DecisionPart(TypedDict):
    """One time that the planner was asked: its explanation, and what came."""

    at: float
    step: int
    why: str
    plan: int | None
    why_not: str
    explanation: ExplanationPart | None
    observed_s: float | None
    observed_steps: int


class PlanPart(TypedDict):
    """One plan that was adopted, and what it gained."""

    plan: int
    at: float
    cause: str
    reasons: list[str]
    train: list[str]
    gradient: list[str]
    servers: list[PlannedServerPart]
    predicted_before_s: float | None
    predicted_after_s: float | None
    cost_s: float | None
    observed_before_s: float | None
    observed_after_s: float | None
    predicted_gain: float | None
    observed_gain: float | None


def plans(reader: Reader) -> list[PlanPart]:
    """Every plan that was adopted, the newest last."""
    return [_plan(plan) for plan in reader.plans()]


def decisions(reader: Reader) -> list[DecisionPart]:
    """The last ``DECISIONS`` times that the planner was asked, the newest last."""
    rows = reader.rows(DecisionRecord, order=f"at DESC LIMIT {DECISIONS}")
    return [
        part_of(DecisionPart, row, explanation=json.loads(row.explanation_json) or None)
        for row in reversed(rows)
    ]


def moves(reader: Reader, adopted: Iterable[PlanPart], *, now: float) -> list[MovePart]:
    """Every move, the newest last, with what its plan gained; a phase under way lasts till now."""
    asked_for = {plan["plan"]: plan for plan in adopted}
    return [_move(move, asked_for.get(move.plan), now=now) for move in reader.moves()]


def changes(before: PlanPart | None, after: PlanPart) -> list[str]:
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


def _tasks(plan: PlanPart) -> dict[str, _Task]:
    tasks: dict[str, _Task] = dict.fromkeys(plan["train"], (Role.TRAIN, ""))
    tasks |= dict.fromkeys(plan["gradient"], (Role.GRADIENT, ""))
    return tasks | {server["slot"]: (Role.ROLLOUT, _shape(server)) for server in plan["servers"]}


def _shape(server: PlannedServerPart) -> str:
    degree, seats = server["tensor_parallel"], server["max_num_seqs"]
    return f"{server['bucket']}, TP {degree}, {seats} seats"


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


def _plan(plan: PlanRecord) -> PlanPart:
    return part_of(
        PlanPart,
        plan,
        reasons=json.loads(plan.reasons_json or "[]"),
        train=json.loads(plan.train_json or "[]"),
        gradient=json.loads(plan.gradient_json or "[]"),
        servers=[_server(*row) for row in json.loads(plan.servers_json or "[]")],
        predicted_gain=_gain(plan.predicted_before_s, plan.predicted_after_s),
        observed_gain=_gain(plan.observed_before_s, plan.observed_after_s),
    )


def _server(slot: str, bucket: str, degree: int, seats: int, up_to: int) -> PlannedServerPart:
    return {
        "slot": slot,
        "bucket": bucket,
        "tensor_parallel": degree,
        "max_num_seqs": seats,
        "up_to_tokens": up_to,
    }


def _gain(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or before <= 0:
        return None
    gain = 1 - after / before
    return gain if math.isfinite(gain) else None


def _move(move: MoveRecord, plan: PlanPart | None, *, now: float) -> MovePart:
    phases = json.loads(move.phases_json or "[]")
    others: dict[str, object] = {
        "from": move.from_role,
        "to": move.to_role,
        "phases": [_phase(*phase, now=now) for phase in phases],
        "predicted_gain": plan["predicted_gain"] if plan else None,
        "observed_gain": plan["observed_gain"] if plan else None,
    }
    return part_of(MovePart, move, **others)


def _phase(phase: str, began: float, ended: float | None, *, now: float) -> PhasePart:
    seconds = max(0.0, (now if ended is None else ended) - began)
    return {"phase": phase, "began": began, "ended": ended, "seconds": seconds}


def phase_seconds(move: MovePart) -> Mapping[str, float]:
    """Return the seconds of each phase; a phase that came twice has the sum."""
    seconds: dict[str, float] = {}
    for phase in move["phases"]:
        seconds[phase["phase"]] = seconds.get(phase["phase"], 0.0) + phase["seconds"]
    return seconds
