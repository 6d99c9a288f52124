"""The slots that exist now, and the servers on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_cli.core.records import PlanRecord, SampleRecord, SlotRecord, SyncRecord
from libra_cli.core.types import Pool, Slot
from libra_cli.report.status.parts import part_of


@dataclass(frozen=True, slots=True)
class ServerPart:
    """One server: what it holds and does, and how its newest sync went."""

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
    engine: str


def existing(
    slots: Sequence[SlotRecord], plan: PlanRecord | None, *, since: float = 0.0
) -> list[SlotRecord]:
    """The slots into which the nodes are divided now, and those whose server is not gone yet.

    A slot that was joined with others, or one that was split, is no more: its row is left behind,
    and so is one of a controller that died before ``since``.
    """
    if plan is None:
        return list(slots)
    servers = (server.slot for server in plan.servers)
    planned = {*plan.train, *plan.gradient, *dict(plan.models), *servers}
    there = [slot_of_row(row) for row in slots if row.slot in planned]

    def is_left(row: SlotRecord) -> bool:
        slot, over = slot_of_row(row), row.since < since or row.state in ("idle", "failed")
        return over and slot.id not in planned and any(slot.overlaps(other) for other in there)

    return [row for row in slots if not is_left(row)]


def slot_of_row(row: SlotRecord) -> Slot:
    """The slot that a row is about; one whose pool nobody wrote down is taken for hybrid."""
    pool = Pool(row.pool) if row.pool in tuple(Pool) else Pool.HYBRID
    return Slot(row.slot, row.node, row.gpus, pool)


def server_part(
    slot: SlotRecord, sample: SampleRecord | None, syncs: Sequence[SyncRecord]
) -> ServerPart:
    """The server of a slot; one that was stopped has the version it took last.

    ``sample`` is its newest reading if that is fresh, ``syncs`` are those of all slots in order.
    """
    last = next((sync for sync in reversed(syncs) if sync.slot == slot.slot), None)
    stopped = slot.version is None and slot.role != "rollout" and last is not None
    return part_of(
        ServerPart,
        slot,
        version=last.version if last and stopped else slot.version,
        verified=last.verified if last and stopped else slot.verified,
        verified_at=last.verified_at if last else None,
        gap=last.gap if last else None,
        queued=sample.waiting if sample else None,
        kv_use=sample.kv_use if sample else None,
        tokens_per_s=sample.tokens_per_s if sample else None,
        prefix_hit_rate=sample.prefix_hit_rate if sample else None,
        preemptions=sample.preemptions if sample else None,
        metrics=sample.metrics if sample else {},
        sync_s=last.served_at - last.published_at if last else None,
        sync_kind=last.kind if last else None,
        sync_sent_bytes=last.sent_bytes if last else None,
    )
