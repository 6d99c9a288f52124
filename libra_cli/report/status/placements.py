"""Where turns were played and what had been expected of them: the scheduler's part of a summary.

What each key means is told in ``summary``. Guarantee: what is not known is null. Limit: estimates
are judged by trajectories that have finished, and the long ones finish last.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from libra_cli.core.records import SampleRecord, SlotRecord
from libra_cli.core.scheduling.estimates import bucket_of
from libra_cli.core.types import Bucket
from libra_cli.report.status.steps import mean
from libra_cli.runtime.store.reader import Placed, Reader, Way


class BucketPart(TypedDict):
    """What the servers of one bucket do together."""

    bucket: str
    up_to_tokens: int
    servers: int
    seats: int
    running: int
    waiting: int
    occupancy: float | None
    turns: int
    moved_in: int
    moved_out: int
    off_by: float | None
    right: float | None


class Placement(TypedDict):
    """How many turns went on at another server."""

    turns: int
    moved: int
    moved_share: float | None


class Estimates(TypedDict):
    """How good the expected lengths were, by trajectories that have finished."""

    turns: int
    below_p10: float | None
    below_p50: float | None
    below_p90: float | None
    off_by: float | None
    right_bucket: float | None
    placed_right: float | None


def planned(reader: Reader) -> dict[str, Bucket]:
    """Slot -> the bucket that it serves by the newest plan."""
    plans = reader.plans()
    servers = json.loads(plans[-1].servers_json) if plans else []
    return {slot: Bucket(*shape) for slot, *shape in servers}


def buckets(
    shapes: Mapping[str, Bucket],
    slots: Sequence[SlotRecord],
    ways: Sequence[Way],
    placed: Sequence[Placed],
    samples: Sequence[SampleRecord],
) -> list[BucketPart]:
    """One entry a bucket, short trajectories first."""
    order = sorted(set(shapes.values()), key=lambda bucket: (bucket.up_to_tokens, bucket.name))
    return [_bucket(bucket, shapes, slots, ways, placed, samples) for bucket in order]


def _bucket(
    bucket: Bucket,
    shapes: Mapping[str, Bucket],
    slots: Sequence[SlotRecord],
    ways: Sequence[Way],
    placed: Sequence[Placed],
    samples: Sequence[SampleRecord],
) -> BucketPart:
    mine = {slot for slot, other in shapes.items() if other == bucket}
    rows = [slot for slot in slots if slot.slot in mine and slot.role == "rollout"]
    moves = [w for w in ways if w.moved_from and (w.slot in mine) != (w.moved_from in mine)]
    judged = estimates([turn for turn in placed if turn.slot in mine], shapes)
    return {
        "bucket": bucket.name,
        "up_to_tokens": bucket.up_to_tokens,
        "servers": len(mine),
        "seats": len(mine) * bucket.max_num_seqs,
        "running": sum(slot.running for slot in rows),
        "waiting": sum(slot.waiting for slot in rows),
        "occupancy": mean(sample.occupancy for sample in samples if sample.slot in mine),
        "turns": _turns(way for way in ways if way.slot in mine),
        "moved_in": _turns(way for way in moves if way.slot in mine),
        "moved_out": _turns(way for way in moves if way.moved_from in mine),
        "off_by": judged["off_by"],
        "right": judged["placed_right"],
    }


def placement(ways: Sequence[Way]) -> Placement:
    """How many turns went on at another server."""
    turns, moved = _turns(w for w in ways if not w.first), _turns(w for w in ways if w.moved_from)
    return {"turns": turns, "moved": moved, "moved_share": moved / turns if turns else None}


def _turns(ways: Iterable[Way]) -> int:
    return sum(way.turns for way in ways)


def estimates(placed: Sequence[Placed], shapes: Mapping[str, Bucket]) -> Estimates:
    """How good the distributions were; null where nothing was expected, or there is one bucket."""
    bounds = sorted({bucket.up_to_tokens for bucket in shapes.values()})[:-1]
    known = [turn for turn in placed if turn.slot in shapes] if bounds else []
    offs = [abs(math.log2(t.expected / t.remaining)) for t in placed if t.remaining > 0]
    return {
        "turns": len(placed),
        "below_p10": _share(turn.remaining <= turn.p10 for turn in placed),
        "below_p50": _share(turn.remaining <= turn.p50 for turn in placed),
        "below_p90": _share(turn.remaining <= turn.p90 for turn in placed),
        "off_by": 2 ** statistics.median(offs) if offs else None,
        "right_bucket": _share(
            bucket_of(turn.expected, bounds) == bucket_of(turn.remaining, bounds) for turn in known
        ),
        "placed_right": _share(
            bucket_of(shapes[turn.slot].up_to_tokens, bounds) == bucket_of(turn.remaining, bounds)
            for turn in known
        ),
    }


def _share(hits: Iterable[bool]) -> float | None:
    return mean(map(float, hits))
