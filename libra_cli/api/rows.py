"""The rows of a run. Times are seconds since the epoch, everything else says its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step."""

    step: int
    started_at: float
    ended_at: float
    metrics: Mapping[str, float] = field(hash=False)
    """By the names of ``core.metric_names``, as monitors are told them; what is not known is left
    out. ``libra help monitors`` has the table with units."""
    checkpoint: str
    """Its path on the hosts that train; empty if none was written."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One evaluation, of weights as they were after a step."""

    evaluation: int
    """Counted from 0 over all evaluations of the run."""
    name: str
    step: int
    """Of the weights at which it began."""
    version_mean: float | None
    """Mean step of the weights that generated its tokens."""
    state: str
    """running, finished or cut."""
    started_at: float
    ended_at: float | None
    tasks: int
    samples: int
    """Trajectories of each task."""
    failed: int
    """Trajectories whose environment broke every time."""
    metrics: Mapping[str, float] = field(hash=False)
    """pass@1, pass@1/low, pass@1/high and so on, with 95 % intervals."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One attempt at one trajectory; an attempt that fails is followed by another."""

    group: int
    """The trajectories of a group have one prompt."""
    member: int
    """Its place in the group, from 0."""
    attempt: int
    state: str
    """running, finished, failed or dropped."""
    step: int | None
    """The step that trained on it; None if none did, or has so far."""
    reward: float | None
    """None until it has ended, and of one that failed."""
    started_at: float
    ended_at: float | None
    turns: int
    generated_tokens: int
    context_tokens: int
    """All its tokens, prompt and tools included."""
    min_version: int | None
    """The oldest weight version that produced a token of it."""
    max_version: int | None
    detail: str
    """Why it failed."""
    environment: str
    """The name of its environment, in a run that has several."""
    metrics: Mapping[str, float] = field(hash=False)
    """What its environment has named, as ``env/NAME``."""


@dataclass(frozen=True, slots=True)
class ToolRow:
    """One tool call."""

    tool: str
    outcome: str
    """ok, error or timeout."""
    latency_s: float
    characters: int
    """Of the text that it returned."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One generation of a trajectory."""

    group: int
    member: int
    attempt: int
    turn: int
    """From 0."""
    slot: str
    """Where its server was."""
    queued_at: float
    started_at: float
    """When a server took it."""
    ended_at: float
    """When it was generated; its tools ran after it."""
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    """stop, or length if a limit cut it."""
    moved_from: str
    """The slot of the turn before, if it was another one."""
    tools: tuple[ToolRow, ...]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of a move."""

    phase: str
    began: float
    ended: float | None
    """None in the phase that is under way."""


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One slot that changed its role, or is about to."""

    move: int
    plan: int
    """The plan that asked for it."""
    slot: str
    from_role: str
    to_role: str
    state: str
    """The phase under way, done or failed."""
    started_at: float
    ended_at: float | None
    phases: tuple[PhaseRow, ...]
    detail: str
    """Why it failed, and where that left the slot."""
