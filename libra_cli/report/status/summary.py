"""What a run looks like right now, computed from its records: the object of `libra status --json`.

Other tools read this object, so its keys stay. A key may be added; one that goes or changes its
meaning raises ``FORMAT``. A number nobody knows yet is null, never 0. Times are seconds since the
epoch, durations are seconds, shares lie between 0 and 1.

How the numbers are made (``RECENT`` = 10):

    reward.first, .last    mean of the steps' rewards over the first and over the last 10 steps
    evaluations[]          one a name: the newest that has finished, with 95 % intervals, the first,
                           and what is under way; they are in no other number
    metrics.*              the same of everything that the trainer and the loss name;
                           servers[].metrics: the newest reading of what the rollout backend names
    logprob_gap            mean over all steps, weighted by the tokens compared in each
    logprob_gap_usual      what is usual with the numbers of served_in; the order, not a bound
    tokens_per_s           generated tokens of the last 10 batches over the time these took; before
                           the first step: the sum over the servers' newest samples
    lengths                over the last 10 steps: tokens a trajectory, and the largest p99
    staleness.mean         mean over all steps, weighted by generated tokens; .max over all steps;
                           .histogram counts trained trajectories by the age of their oldest token
    batches                of all steps, what the rule that makes a batch (training.staleness) did;
                           .over_bound is the share of tokens over training.max_staleness; what
                           dynamic sampling left out, and how many trajectories were truncated
    idle.rollout           1 - busy seconds / serving seconds, summed over the servers
    idle.training          seconds the trainer stood idle before its steps / (those + step seconds)
    idle.recent_*          the same over the last 10 steps (rollout: share of samples that saw no
                           request running)
    playing.*_s            seconds of a trajectory, means over those that have finished in the last
                           10 steps; .environment_s is without .waiting_s
    buckets                what servers of one bucket do together, by the plan now; .occupancy is
                           the mean share of their seats that were taken over the last 10 steps;
                           .moved_in, .moved_out count turns whose trajectory had its turn before on
                           a server of another bucket
    placement.turns        turns that followed a tool return or another turn; .moved those of them
                           on another server than the one before
    moves.phases           .seconds until the phase ended; of the one under way, until now or until
                           the run ended
    plans.*_gain           1 - seconds a step after / before, as predicted when the plan was chosen
                           and as observed around its moves; a move has those of its plan. Below 0
                           the steps are longer than before
    decisions[]            the last 100 times the planner was asked; .explanation is what it told,
                           null where it could not decide; .observed_s is the mean of the first
                           steps after it and its moves, at most 5 and until the next decision
    sync.*_s               from publication until the *last* server that took the version served it
    sync.full .delta .fabric .local  proved syncs whose version was pulled whole or as what changed,
                           came by a process group over the trusted interface, or was on the
                           server's host already; .fabric_missed of the pulls should have come by a
                           group, and .fabric_detail says why the last of them did not; .sent_bytes
                           is what travelled for all of them, and .full_bytes what would have, had
                           each of the pulls been a full copy

    regret                 what the run lost to the best plan that stays, found when it ended; null
                           before, and of a run of an older libra

A controller that died wrote no end. It is recognised by its pid, the pid's start time and the boot
it belongs to, and the run is then shown as failed; it ended when it last wrote.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from libra_cli.core.json_form import json_form
from libra_cli.core.records import (
    DecisionRecord,
    ExportRecord,
    FrozenModelRecord,
    NodeRecord,
    PlanRecord,
    ProcessRecord,
    RegretRecord,
    SlotRecord,
)
from libra_cli.report.status import slots as slot_parts
from libra_cli.report.status import steps as step_parts
from libra_cli.report.status.batches import BatchesPart, batches
from libra_cli.report.status.evaluations import EvaluationPart, evaluation_parts
from libra_cli.report.status.metrics import FirstLast, first_last
from libra_cli.report.status.placements import (
    BucketPart,
    Placement,
    buckets,
    placement,
    planned,
)
from libra_cli.report.status.plans import MovePart, decisions, moves
from libra_cli.report.status.playing import PlayingPart, playing
from libra_cli.report.status.precision import USUAL_GAP, served_in
from libra_cli.report.status.run_state import (
    LIVE,
    RunPart,
    WarningPart,
    errors_of,
    run_part,
    warnings_of,
)
from libra_cli.report.status.syncs import Sync, sync_part
from libra_cli.runtime.store.joined_rows import TrajectoryCounts
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run

FORMAT = 2
_FRESH_S = 30.0
"""A server's reading that is older says nothing about now."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The object of ``libra status --json``; ``libra help status`` has its keys."""

    format: int
    run: RunPart
    step: int
    weight_version: int
    reward: FirstLast
    evaluations: list[EvaluationPart]
    metrics: dict[str, FirstLast]
    lengths: step_parts.Lengths
    logprob_gap: float | None
    logprob_gap_max: float | None
    served_in: str | None
    logprob_gap_usual: float | None
    tokens_per_s: float | None
    step_s: float | None
    staleness: step_parts.Staleness
    batches: BatchesPart
    trajectories: TrajectoryCounts
    idle: step_parts.IdlePart
    playing: PlayingPart
    sync: Sync
    slots: list[SlotRecord]
    servers: list[slot_parts.ServerPart]
    buckets: list[BucketPart]
    placement: Placement
    nodes: list[NodeRecord]
    processes: list[ProcessRecord]
    moves: list[MovePart]
    plans: list[PlanRecord]
    plan: PlanRecord | None
    decisions: list[DecisionRecord]
    decision: DecisionRecord | None
    checkpoint: step_parts.CheckpointPart | None
    models: list[ExportRecord]
    frozen_models: list[FrozenModelRecord]
    regret: RegretRecord | None
    warnings: list[WarningPart]
    errors: list[str]


def status_of(run_dir: Path | None) -> RunSummary:
    """What this run, or the newest one, looks like now.

    Raises:
        StateError: there is no such run.
    """
    with Reader(run_dir or newest_run()) as reader:
        return summary(reader, now=time.time())


def summary(reader: Reader, *, now: float) -> RunSummary:
    """Compute the object of ``libra status --json``; ``now`` is in seconds since the epoch."""
    run = run_part(reader, now=now)
    record, steps, syncs = reader.run(), reader.steps(), reader.syncs()
    slots = _slots(reader)
    live = run.state in LIVE
    samples = reader.latest_samples() if live else {}
    fresh = {slot: sample for slot, sample in samples.items() if now - sample.at <= _FRESH_S}
    servers = [
        slot_parts.server_part(
            slot, fresh.get(slot.slot), [sync for sync in syncs if sync.slot == slot.slot]
        )
        for slot in slots
        if slot.role == "rollout" or (not live and any(sync.slot == slot.slot for sync in syncs))
    ]
    shapes, ways = planned(reader), reader.ways()
    recent = step_parts.recent_samples(reader, steps)
    idle = step_parts.idle(recent, steps, slots)
    adopted, decided = reader.plans(), decisions(reader)
    precision = served_in(reader.run_dir)
    return RunSummary(
        format=FORMAT,
        run=run,
        step=record.step,
        weight_version=record.version,
        reward=step_parts.reward(steps),
        evaluations=evaluation_parts(reader.evaluations(), live=live),
        metrics=first_last(steps, step_parts.RECENT),
        lengths=step_parts.lengths(steps),
        logprob_gap=step_parts.logprob_gap(steps),
        logprob_gap_max=step_parts.logprob_gap_max(steps),
        served_in=precision,
        logprob_gap_usual=USUAL_GAP.get(precision or ""),
        tokens_per_s=step_parts.tokens_per_s(steps, fresh.values()),
        step_s=step_parts.step_s(steps),
        staleness=step_parts.staleness(reader, steps),
        batches=batches(reader, steps),
        trajectories=step_parts.trajectories(reader, live=live),
        idle=idle,
        playing=playing(reader, steps, idle),
        sync=sync_part(syncs),
        slots=slots,
        servers=servers,
        buckets=buckets(shapes, slots, ways, recent),
        placement=placement(ways),
        nodes=reader.nodes(),
        processes=reader.processes(),
        moves=moves(reader, now=now if run.ended_at is None else run.ended_at),
        plans=adopted,
        plan=adopted[-1] if adopted else None,
        decisions=decided,
        decision=decided[-1] if decided else None,
        checkpoint=step_parts.checkpoint(steps),
        models=reader.exports(),
        frozen_models=reader.frozen_models(),
        regret=reader.regret(),
        warnings=warnings_of(reader),
        errors=errors_of(reader, run, slots, syncs),
    )


def judged_by(told: RunSummary) -> tuple[str, FirstLast]:
    """What a run is judged by and how that has changed: its reward, or the loss of demonstrations,
    of which all have the same reward."""
    if step_parts.IMITATES in told.metrics:
        return "loss", told.metrics["loss"]
    return "reward", told.reward


def _slots(reader: Reader) -> list[SlotRecord]:
    """The slots that exist; each time that the run was started it began with the recipe's."""
    plans = reader.plans()
    began = max((plan.at for plan in plans if plan.cause == "start"), default=0.0)
    return slot_parts.existing(reader.slots(), plans[-1] if plans else None, since=began)


def to_json(value: object) -> str:
    """The object as text."""
    return json.dumps(json_form(value), indent=2, allow_nan=False)
