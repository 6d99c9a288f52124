"""The rows of a run. Times are seconds since the epoch, everything else says its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRow:
    """An optimizer step of the run."""

    step: int
    started_at: float
    ended_at: float
    metrics: Mapping[str, float] = field(hash=False)
    """Metrics by the names of ``core.metric_names``, as monitors are told them; what is not known
    is left out. ``libra help monitors`` has the table with units.
    """
    checkpoint: str
    """Path of the checkpoint on the hosts that train; empty if none was written."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """An evaluation of the weights after a step."""

    evaluation: int
    """Counted from 0 over all evaluations of the run."""
    name: str
    step: int
    """The step of the weights at which the evaluation began."""
    version_mean: float | None
    """Mean step of the weights that generated its tokens."""
    state: str
    """Either ``running``, ``finished`` or ``cut``."""
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
    """An attempt at a trajectory; an attempt that fails is followed by another."""

    group: int
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


@dataclass(frozen=True, slots=True)
class ToolRow:
    """A tool call of a turn."""

    tool: str
    outcome: str
    """Either ``ok``, ``error`` or ``timeout``."""
    latency_s: float
    characters: int
    """Characters of the text that it returned."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A generation of a trajectory, with the tool calls after it."""

    group: int
    member: int
    attempt: int
    turn: int
    """The number of the turn, from 0."""
    slot: str
    """The slot of the server that generated it."""
    queued_at: float
    started_at: float
    """When a server began to generate it."""
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
    """A phase of a move, in seconds since the epoch."""

    phase: str
    began: float
    ended: float | None
    """None in the phase that is under way."""


@dataclass(frozen=True, slots=True)
class MoveRow:
    """A slot's move from one role to another, done or under way."""

    move: int
    plan: int
    """The number of the plan that asked for the move."""
    slot: str
    from_role: str
    to_role: str
    state: str
    """The phase under way, or ``done`` or ``failed``."""
    started_at: float
    ended_at: float | None
    phases: tuple[PhaseRow, ...]
    detail: str
    """Why it failed, and where that left the slot."""
