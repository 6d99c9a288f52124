"""The part of the summary on syncs: how fast weight versions came to servers, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra_cli.core.records import SyncRecord
from libra_cli.report.status.steps import largest, mean


@dataclass(frozen=True, slots=True)
class Sync:
    """Counts of server syncs, seconds a version took, and bytes; see ``summary``."""

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
    fabric: int
    fabric_missed: int
    """Pulls that were to come over the fabric and did not."""
    fabric_detail: str
    """Why the newest of them did not; empty if there is none."""
    sent_bytes: int
    full_bytes: int


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


def sync_part(syncs: Sequence[SyncRecord]) -> Sync:
    """How the versions came to the servers, over the whole run."""
    times = list(sync_times(syncs).values())
    missed = [sync for sync in syncs if sync.verified and sync.detail]
    return Sync(
        versions=len({(sync.version, sync.trainer_incarnation) for sync in syncs}),
        verified=sum(sync.verified for sync in syncs),
        failed=sum(not sync.verified for sync in syncs),
        mean_s=mean(times),
        max_s=largest(times),
        last_s=times[-1] if times else None,
        gap_max=largest(sync.gap for sync in syncs if sync.gap is not None),
        full=sum(sync.kind == "full" for sync in syncs),
        delta=sum(sync.kind == "delta" for sync in syncs),
        local=sum(sync.kind == "local" for sync in syncs),
        fabric=sum(sync.kind == "fabric" for sync in syncs),
        fabric_missed=len(missed),
        fabric_detail=missed[-1].detail if missed else "",
        sent_bytes=sum(sync.sent_bytes for sync in syncs),
        full_bytes=sum(sync.bytes for sync in syncs if sync.kind in ("full", "delta")),
    )
