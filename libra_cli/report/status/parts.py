"""The parts of the object that `libra status --json` prints, key by key.

What each key means, and how its number is made, is told in ``monitors``; the scheduler's parts are
in ``placements``, those of plans and moves in ``plans``.
"""

from __future__ import annotations

from typing import TypedDict


class RunPart(TypedDict):
    id: str
    state: str
    recipe: str
    directory: str
    started_at: float
    ended_at: float | None
    elapsed_s: float
    target_steps: int
    waiting: str
    error: str


class Lengths(TypedDict):
    mean: float | None
    p99: float | None


class Staleness(TypedDict):
    mean: float | None
    max: int | None
    histogram: dict[str, int]


class Trajectories(TypedDict):
    finished: int
    trained: int
    in_flight: int
    retried: int
    failed: int
    dropped: int


class IdlePart(TypedDict):
    rollout: float | None
    training: float | None
    recent_rollout: float | None
    recent_training: float | None


class Sync(TypedDict):
    versions: int
    verified: int
    failed: int
    mean_s: float | None
    max_s: float | None
    last_s: float | None
    gap_max: float | None
    full: int
    delta: int
    local: int
    sent_bytes: int
    full_bytes: int


class SlotPart(TypedDict):
    slot: str
    node: str
    gpus: list[int]
    pool: str
    role: str
    state: str
    since: float
    incarnation: int
    bucket: str
    version: int | None
    verified: bool
    running: int
    waiting: int
    idle: float | None
    restarts: int
    detail: str


class ServerPart(TypedDict):
    slot: str
    node: str
    bucket: str
    state: str
    version: int | None
    verified: bool
    verified_at: float | None
    gap: float | None
    running: int
    waiting: int
    queued: int | None
    kv_use: float | None
    tokens_per_s: float | None
    prefix_hit_rate: float | None
    preemptions: int | None
    metrics: dict[str, float | None]
    sync_s: float | None
    sync_kind: str | None
    sync_sent_bytes: int | None
    restarts: int


class NodePart(TypedDict):
    node: str
    host: str
    state: str
    since: float
    detail: str


class ProcessPart(TypedDict):
    node: str
    process: str
    pid: int
    state: str
    since: float
    exit_code: int | None
    log: str


class CheckpointPart(TypedDict):
    step: int
    path: str
