"""What a move cost everybody else: the other servers' speed and the core's steps around it.

Three spans: the ``AROUND_S`` before a move began, the move, and the ``AROUND_S`` after it ended. A
turn counts with the share of its tokens that falls into a span, as if it generated evenly; a core
step counts in every span that it overlaps. Limit: where slots share the cores of one host, as on a
machine without GPUs, a process that starts slows the others through the cores it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from libra_cli.core.records import MoveRecord, StepRecord, TurnRecord
from libra_cli.core.types import Seconds, Slot, SlotId
from libra_cli.report.status.slots import slot_of_row
from libra_cli.runtime.store.reader import Reader

AROUND_S: Seconds = 10.0


@dataclass(frozen=True, slots=True)
class Span:
    """``tokens_per_s`` of all other servers together; ``step_s`` of the core, None without one."""

    tokens_per_s: float
    step_s: float | None


@dataclass(frozen=True, slots=True)
class MigrationImpact:
    """Speed of the other servers, and of the core's steps, before, during and after one move."""

    before: Span
    during: Span
    after: Span


def migration_impacts(
    reader: Reader, moves: Sequence[MoveRecord]
) -> list[tuple[MoveRecord, MigrationImpact]]:
    """What each move that has ended cost the others."""
    steps, slots = reader.steps(), {row.slot: slot_of_row(row) for row in reader.slots()}
    return [
        (move, _around(reader, steps, move, _shares(move.slot, slots), move.ended_at))
        for move in moves
        if move.ended_at is not None
    ]


def _shares(mine: SlotId, slots: Mapping[SlotId, Slot]) -> set[SlotId]:
    """Return the slot and those that share devices with it, which are joined to be it or split of
    it.
    """
    held = slots.get(mine)
    return {mine} | {slot.id for slot in slots.values() if held and slot.overlaps(held)}


def _around(
    reader: Reader,
    steps: Sequence[StepRecord],
    move: MoveRecord,
    mine: Collection[SlotId],
    ended: float,
) -> MigrationImpact:
    began = move.started_at
    turns = reader.turns_between(began - AROUND_S, ended + AROUND_S)
    others = [turn for turn in turns if turn.slot not in mine]
    cuts = (began - AROUND_S, began, ended, ended + AROUND_S)
    spans = [_span(others, steps, since, until) for since, until in pairwise(cuts)]
    return MigrationImpact(*spans)


def _span(
    turns: Sequence[TurnRecord], steps: Sequence[StepRecord], since: float, until: float
) -> Span:
    tokens = sum(_tokens(turn, since, until) for turn in turns)
    taken = [step.train_s for step in steps if step.started_at < until and step.ended_at > since]
    step_s = sum(taken) / len(taken) if taken else None
    return Span(tokens / max(until - since, 1e-9), step_s)


def _tokens(turn: TurnRecord, since: float, until: float) -> float:
    lasted = max(turn.ended_at - turn.started_at, 1e-9)
    inside = min(turn.ended_at, until) - max(turn.started_at, since)
    return turn.generated_tokens * max(0.0, inside) / lasted
