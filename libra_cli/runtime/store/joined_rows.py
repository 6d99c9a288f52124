"""Rows that no table has: the reader joins or counts them from several tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """An attempt at a trajectory; an attempt that fails is followed by another."""

    SHOWN: ClassVar[Mapping[str, str]] = {"group": "group_id"}
    group_id: int
    """The trajectories of a group have one prompt."""
    member: int
    """The trajectory's place in the group, from 0."""
    attempt: int
    state: str
    """Either ``running``, ``finished``, ``failed`` or ``dropped``."""
    step: int | None
    """The step that trained on it; None if none did, or has so far."""
    reward: float | None
    """None until it has ended, and of one that failed."""
    started_at: float
    ended_at: float | None
    turns: int
    generated_tokens: int
    context_tokens: int
    """Tokens of all its branches, prompt and tool returns included."""
    min_version: int | None
    """The oldest weight version that produced a token of it."""
    max_version: int | None
    detail: str
    """The reason why it failed; empty if it did not."""
    environment: str
    """The name of its environment, in a run that has several."""
    metrics: Mapping[str, float] = field(hash=False)
    """Metrics that its environment reported, as ``env/NAME``."""

    @property
    def group(self) -> int:
        """``group_id``, as ``libra_cli.api`` calls it too."""
        return self.group_id


@dataclass(frozen=True, slots=True)
class TrajectoryCounts:
    """Attempts, by what became of them; ``trained``: those of ``finished`` whose group was used."""

    finished: int
    trained: int
    in_flight: int
    retried: int
    failed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Length:
    """One finished trajectory, as far as lengths are concerned."""

    ended_at: float
    generated_tokens: int
    turns: int


@dataclass(frozen=True, slots=True)
class TurnPlacement:
    """Number of turns on ``slot`` by the slot of the trajectory's turn before.

    ``moved_from`` is empty where that was the same slot, or where it was its ``first`` turn.
    """

    slot: str
    moved_from: str
    first: bool
    turns: int
