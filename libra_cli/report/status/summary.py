"""What a run looks like right now, computed from its records: the object of `libra status --json`.

Other tools read this object, so its keys stay. A key may be added; one that goes or changes its
meaning raises ``FORMAT``. A number nobody knows yet is null, never 0. Times are seconds since the
incarnation, durations are seconds, shares lie between 0 and 1.

How the numbers are made (``RECENT`` = 10):

    reward.first, .last    mean of the steps' rewards over the first and over the last 10 steps
    metrics.*              the same of everything that the trainer and the loss name;
                           servers[].metrics: the newest reading of what the rollout backend names
    logprob_gap            mean over all steps, weighted by the tokens compared in each
    tokens_per_s           generated tokens of the last 10 batches over the time these took; before
                           the first step: the sum over the servers' newest samples
    lengths                over the last 10 steps: tokens a trajectory, and the largest p99
    staleness.mean         mean over all steps, weighted by generated tokens; .max over all steps;
                           .histogram counts trained trajectories by the age of their oldest token
    idle.rollout           1 - busy seconds / serving seconds, summed over the servers
    idle.training          seconds the trainer stood idle before its steps / (those + step seconds)
    idle.recent_*          the same over the last 10 steps (rollout: share of samples that saw no
                           request running)
    buckets                what servers of one bucket do together, by the plan now; .occupancy is
                           the mean share of their seats that were taken over the last 10 steps;
                           .moved_in, .moved_out count turns whose trajectory had its turn before on
                           a server of another bucket; .off_by and .right are estimates.off_by and
                           .placed_right of the turns that were played there
    placement.turns        turns that followed a tool return or another turn; .moved those of them
                           on another server than the one before
    estimates              of the turns of the last 2,000 finished trajectories, what was expected
                           beside what came: .below_p10 is the share that had at most the 10th
                           percentile left to generate (so 0.1 is right), and so on; .off_by the
                           factor that half of them were off by, at most (2 ** the median of
                           |log2(expected / came)|); .right_bucket the share expected in the bucket
                           whose bounds they belonged to, .placed_right the share played there
    moves.phases           .seconds until the phase ended; of the one under way, until now or until
                           the run ended
    plans.*_gain           1 - seconds a step after / before, as predicted when the plan was chosen
                           and as observed around its moves; a move has those of its plan. Below 0
                           the steps are longer than before
    sync.*_s               from publication until the *last* server that took the version served it
    sync.full .delta .local  proved syncs whose version came whole, as what changed, or was on the
                           server's host already; .sent_bytes is what travelled for all of them,
                           and .full_bytes what would have, had each of the pulls been a full copy

A controller that died wrote no end. It is recognised by its pid, the pid's start time and the boot
it belongs to, and the run is then shown as failed; it ended when it last wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from libra_cli.config.errors import StateError
from libra_cli.core.records import (
    RunRecord,
    SampleRecord,
    SlotRecord,
    StepRecord,
    SyncRecord,
)
from libra_cli.report.status.metrics import FirstLast, first_last
from libra_cli.report.status.parts import (
    CheckpointPart,
    IdlePart,
    Lengths,
    NodePart,
    ProcessPart,
    RunPart,
    ServerPart,
    SlotPart,
    Staleness,
    Sync,
    Trajectories,
)
from libra_cli.report.status.placements import (
    BucketPart,
    Estimates,
    Placement,
    buckets,
    estimates,
    placement,
    planned,
)
from libra_cli.report.status.plans import MovePart, PlanPart, moves, plans
from libra_cli.runtime.store.journal import DATABASE, boot_id
from libra_cli.runtime.store.reader import Reader

FORMAT = 1
RECENT = 10
LIVE = ("starting", "running")
_FRESH_S = 30.0
_STAT_STATE, _STAT_START = 0, 19
"""Fields 3 and 22 of /proc/<pid>/stat, counted after the command's closing parenthesis."""


class RunSummary(TypedDict):
    """The object of ``libra status --json``; the README explains it key by key."""

    format: int
    run: RunPart
    step: int
    weight_version: int
    reward: FirstLast
    metrics: dict[str, FirstLast]
    lengths: Lengths
    logprob_gap: float | None
    logprob_gap_max: float | None
    tokens_per_s: float | None
    step_s: float | None
    staleness: Staleness
    trajectories: Trajectories
    idle: IdlePart
    sync: Sync
    slots: list[SlotPart]
    servers: list[ServerPart]
    buckets: list[BucketPart]
    placement: Placement
    estimates: Estimates
    nodes: list[NodePart]
    processes: list[ProcessPart]
    moves: list[MovePart]
    plans: list[PlanPart]
    plan: PlanPart | None
    checkpoint: CheckpointPart | None
    errors: list[str]


def summary(reader: Reader, *, now: float) -> RunSummary:
    """Everything about the run, as of ``now``."""
    run = run_part(reader, now=now)
    record, steps, slots, syncs = reader.run(), reader.steps(), reader.slots(), reader.syncs()
    live = run["state"] in LIVE
    samples = reader.latest_samples() if live else {}
    fresh = {slot: sample for slot, sample in samples.items() if now - sample.at <= _FRESH_S}
    servers = [
        _server(slot, fresh.get(slot.slot), [sync for sync in syncs if sync.slot == slot.slot])
        for slot in slots
        if slot.role == "rollout" or (not live and any(sync.slot == slot.slot for sync in syncs))
    ]
    gaps = [step for step in steps if step.logprob_gap is not None]
    shapes, ways, placed = planned(reader), reader.ways(), reader.placed()
    recent, adopted = _recent_samples(reader, steps), plans(reader)
    return {
        "format": FORMAT,
        "run": run,
        "step": record.step,
        "weight_version": record.version,
        "reward": {
            "first": _mean(step.reward for step in steps[:RECENT]),
            "last": _mean(step.reward for step in steps[-RECENT:]),
        },
        "metrics": first_last(steps, RECENT),
        "lengths": _lengths(steps),
        "logprob_gap": _weighted(gaps, _gap, lambda step: step.logprob_gap_tokens),
        "logprob_gap_max": _largest(_gap(step) for step in gaps),
        "tokens_per_s": _speed(steps, fresh.values()),
        "step_s": _mean(_period(step) for step in steps[-RECENT:]),
        "staleness": _staleness(reader, steps),
        "trajectories": _trajectories(reader, live=live),
        "idle": _idle(recent, steps, slots),
        "sync": _sync(syncs),
        "slots": [_slot(slot) for slot in slots],
        "servers": servers,
        "buckets": buckets(shapes, slots, ways, placed, recent),
        "placement": placement(ways),
        "estimates": estimates(placed, shapes),
        "nodes": _nodes(reader),
        "processes": _processes(reader),
        "moves": moves(reader, adopted, now=now if run["ended_at"] is None else run["ended_at"]),
        "plans": adopted,
        "plan": adopted[-1] if adopted else None,
        "checkpoint": _checkpoint(steps),
        "errors": _errors(reader, run, slots, syncs),
    }


def to_json(value: Mapping[str, Any]) -> str:
    """The object as text. JSON knows no NaN, so what is not a number is null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def newest_run(directory: Path) -> Path:
    """The run under ``directory`` that started last."""
    started: dict[Path, float] = {}
    for database in directory.glob(f"*/{DATABASE}"):
        try:
            with Reader(database.parent) as reader:
                started[database.parent] = reader.run().started_at
        except StateError:
            continue  # of another version, or just being made: not what was asked for
    if not started:
        raise StateError(
            f"there is no run under {directory}",
            hint="libra run recipes/quickstart.yaml, or name a run directory",
        )
    return max(started, key=lambda run_dir: (started[run_dir], run_dir.name))


def process_started(pid: int) -> float | None:
    """The start time of a living process in clock ticks since boot; None if it does not live."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    values = stat.rpartition(")")[2].split()
    return None if values[_STAT_STATE] in "ZX" else float(values[_STAT_START])


def controller_alive(reader: Reader) -> bool:
    """Whether the run's controller still lives. A run of another machine is believed."""
    if reader.meta.get("host") != Path("/proc/sys/kernel/hostname").read_text().strip():
        return True
    run = reader.run()
    started = process_started(run.controller_pid)
    return reader.meta.get("boot") == boot_id() and started == run.controller_started


def run_part(reader: Reader, *, now: float) -> RunPart:
    """The run itself, with a dead controller's silence put into words."""
    run = reader.run()
    state, ended_at, error, waiting = run.state, run.ended_at, run.error, run.waiting
    if state in LIVE and not controller_alive(reader):
        state, ended_at, waiting = "failed", reader.last_written() or run.started_at, ""
        error = error or _death(run, reader)
    return {
        "id": run.id,
        "state": state,
        "recipe": run.recipe,
        "directory": str(reader.run_dir),
        "started_at": run.started_at,
        "ended_at": ended_at,
        "elapsed_s": (now if ended_at is None else ended_at) - run.started_at,
        "target_steps": run.target_steps,
        "waiting": waiting,
        "error": error,
    }


def _death(run: RunRecord, reader: Reader) -> str:
    return (
        f"the controller (pid {run.controller_pid}) died without ending the run;"
        f" what it left on the hosts stops by itself, or now: libra stop {reader.run_dir}"
    )


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def _largest(values: Iterable[float]) -> float | None:
    return max((value for value in values if math.isfinite(value)), default=None)


def _weighted(
    steps: Sequence[StepRecord],
    value: Callable[[StepRecord], float],
    weight: Callable[[StepRecord], float],
) -> float | None:
    known = [(value(step), weight(step)) for step in steps if math.isfinite(value(step))]
    total = sum(weight_ for _, weight_ in known)
    return sum(value_ * weight_ for value_, weight_ in known) / total if total else None


def _gap(step: StepRecord) -> float:
    return math.nan if step.logprob_gap is None else step.logprob_gap


def _period(step: StepRecord) -> float:
    return step.waited_s + step.ended_at - step.started_at


def _lengths(steps: Sequence[StepRecord]) -> Lengths:
    recent = [step for step in steps[-RECENT:] if step.mean_length > 0]
    trajectories = sum(step.generated_tokens / step.mean_length for step in recent)
    return {
        "mean": sum(s.generated_tokens for s in recent) / trajectories if recent else None,
        "p99": _largest(step.p99_length for step in recent),
    }


def _speed(steps: Sequence[StepRecord], samples: Iterable[SampleRecord]) -> float | None:
    recent = [step for step in steps[-RECENT:] if step.tokens_per_s > 0]
    if recent:
        seconds = sum(step.generated_tokens / step.tokens_per_s for step in recent)
        return sum(step.generated_tokens for step in recent) / seconds if seconds else None
    speeds = [sample.tokens_per_s for sample in samples]
    return sum(speeds) if speeds else None


def _staleness(reader: Reader, steps: Sequence[StepRecord]) -> Staleness:
    histogram = reader.staleness_histogram()
    return {
        "mean": _weighted(
            steps, lambda step: step.staleness_mean, lambda step: step.generated_tokens
        ),
        "max": max((step.staleness_max for step in steps), default=None),
        "histogram": {str(staleness): count for staleness, count in histogram.items()},
    }


def _trajectories(reader: Reader, *, live: bool) -> Trajectories:
    counts = reader.trajectory_counts()
    return {
        "finished": counts.finished,
        "trained": counts.trained,
        "in_flight": counts.running if live else 0,
        "retried": counts.retried,
        "failed": counts.failed,
        # What was running when the run ended was never finished, and nobody will.
        "dropped": counts.dropped + (0 if live else counts.running),
    }


def _recent_samples(reader: Reader, steps: Sequence[StepRecord]) -> list[SampleRecord]:
    """Those of the last steps; none before the first."""
    recent = steps[-RECENT:]
    return reader.samples(recent[0].started_at - recent[0].waited_s) if recent else []


def _idle(
    samples: Sequence[SampleRecord], steps: Sequence[StepRecord], slots: Sequence[SlotRecord]
) -> IdlePart:
    serving = sum(slot.serving_s for slot in slots)
    busy = sum(slot.busy_s for slot in slots)
    return {
        "rollout": max(0.0, 1 - busy / serving) if serving else None,
        "training": _waited_share(steps),
        "recent_rollout": _mean(float(sample.running == 0) for sample in samples),
        "recent_training": _waited_share(steps[-RECENT:]),
    }


def _waited_share(steps: Sequence[StepRecord]) -> float | None:
    total = sum(_period(step) for step in steps)
    return sum(step.waited_s for step in steps) / total if total else None


def smooth(values: Sequence[float]) -> list[float]:
    """A centred moving mean over about an eighth of the run; the nearer weighs more, and what is
    not finite is left out."""
    half = max(2, len(values) // 14)
    weights = [1 - (distance / (half + 1)) ** 2 for distance in range(half + 1)]
    return [_around(values, at, weights) for at in range(len(values))]


def _around(values: Sequence[float], at: int, weights: Sequence[float]) -> float:
    half = len(weights) - 1
    near = range(max(0, at - half), min(len(values), at + half + 1))
    known = [(values[i], weights[abs(i - at)]) for i in near if math.isfinite(values[i])]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else math.nan


def sync_times(syncs: Iterable[SyncRecord]) -> dict[int, float]:
    """Version -> seconds from its publication until the last server that took it served it.

    A server that was only starting when a version came out takes it late, and nobody waited for
    it: only the first ``served_at`` of a slot within its incarnation says how fast the sync is.
    """
    joined = {(s.slot, s.incarnation): s.version for s in sorted(syncs, key=lambda s: -s.served_at)}
    times: dict[int, float] = {}
    for sync in syncs:
        if joined[sync.slot, sync.incarnation] != sync.version:
            seconds = sync.served_at - sync.published_at
            times[sync.version] = max(seconds, times.get(sync.version, 0.0))
    return dict(sorted(times.items()))


def _sync(syncs: Sequence[SyncRecord]) -> Sync:
    times = list(sync_times(syncs).values())
    return {
        "versions": len({(sync.version, sync.trainer_incarnation) for sync in syncs}),
        "verified": sum(sync.verified for sync in syncs),
        "failed": sum(not sync.verified for sync in syncs),
        "mean_s": _mean(times),
        "max_s": _largest(times),
        "last_s": times[-1] if times else None,
        "gap_max": _largest(sync.gap for sync in syncs if sync.gap is not None),
        "full": sum(sync.kind == "full" for sync in syncs),
        "delta": sum(sync.kind == "delta" for sync in syncs),
        "local": sum(sync.kind == "local" for sync in syncs),
        "sent_bytes": sum(sync.sent_bytes for sync in syncs),
        "full_bytes": sum(sync.bytes for sync in syncs if sync.kind in ("full", "delta")),
    }


def _slot(slot: SlotRecord) -> SlotPart:
    return {
        "slot": slot.slot,
        "node": slot.node,
        "gpus": json.loads(slot.gpus_json or "[]"),
        "pool": slot.pool,
        "role": slot.role,
        "state": slot.state,
        "since": slot.since,
        "incarnation": slot.incarnation,
        "bucket": slot.bucket,
        "version": slot.version,
        "verified": slot.verified,
        "running": slot.running,
        "waiting": slot.waiting,
        "idle": max(0.0, 1 - slot.busy_s / slot.serving_s) if slot.serving_s else None,
        "restarts": slot.restarts,
        "detail": slot.detail,
    }


def _server(
    slot: SlotRecord, sample: SampleRecord | None, syncs: Sequence[SyncRecord]
) -> ServerPart:
    last = syncs[-1] if syncs else None
    stopped = slot.version is None and slot.role != "rollout" and last is not None
    return {
        "slot": slot.slot,
        "node": slot.node,
        "bucket": slot.bucket,
        "state": slot.state,
        "version": last.version if last and stopped else slot.version,
        "verified": last.verified if last and stopped else slot.verified,
        "verified_at": last.verified_at if last else None,
        "gap": last.gap if last else None,
        "running": slot.running,
        "waiting": slot.waiting,
        "queued": sample.waiting if sample else None,
        "kv_use": sample.kv_use if sample else None,
        "tokens_per_s": sample.tokens_per_s if sample else None,
        "prefix_hit_rate": sample.prefix_hit_rate if sample else None,
        "preemptions": sample.preemptions if sample else None,
        "metrics": sample.metrics if sample else {},
        "sync_s": last.served_at - last.published_at if last else None,
        "sync_kind": last.kind if last else None,
        "sync_sent_bytes": last.sent_bytes if last else None,
        "restarts": slot.restarts,
    }


def _nodes(reader: Reader) -> list[NodePart]:
    return [
        {
            "node": node.node,
            "host": node.host,
            "state": node.state,
            "since": node.since,
            "detail": node.detail,
        }
        for node in reader.nodes()
    ]


def _processes(reader: Reader) -> list[ProcessPart]:
    return [
        {
            "node": process.node,
            "process": process.process,
            "pid": process.pid,
            "state": process.state,
            "since": process.since,
            "exit_code": process.exit_code,
            "log": process.log,
        }
        for process in reader.processes()
    ]


def _checkpoint(steps: Sequence[StepRecord]) -> CheckpointPart | None:
    for step in reversed(steps):
        if step.checkpoint:
            return {"step": step.step, "path": step.checkpoint}
    return None


def _errors(
    reader: Reader, run: RunPart, slots: Sequence[SlotRecord], syncs: Sequence[SyncRecord]
) -> list[str]:
    errors = [run["error"]] if run["error"] else []
    errors += [
        f"node {node.node} ({node.host}): {node.state}: {node.detail or 'no reason given'}"
        for node in reader.nodes()
        if node.state in ("failed", "unreachable")
    ]
    errors += [
        f"slot {slot.slot}: failed: {slot.detail or 'no reason given'}"
        for slot in slots
        if slot.role == "failed" or slot.state == "failed"
    ]
    errors += [
        f"slot {sync.slot}: version {sync.version} does not verify: {sync.detail}"
        for sync in syncs
        if not sync.verified
    ]
    return errors


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
