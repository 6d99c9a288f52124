"""Where turns were played: the scheduler's part of a summary.

What each key means is told in ``summary``. Guarantee: what is not known is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from libra_cli.core.records import SampleRecord, SlotRecord
from libra_cli.core.types import Bucket
from libra_cli.report.status.steps import mean
from libra_cli.runtime.store.joined_rows import TurnPlacement
from libra_cli.runtime.store.reader import Reader


@dataclass(frozen=True, slots=True)
class BucketPart:
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


@dataclass(frozen=True, slots=True)
class Placement:
    """How many turns went on at another server."""

    turns: int
    moved: int
    moved_share: float | None


def planned(reader: Reader) -> dict[str, Bucket]:
    """Slot -> the bucket that it serves by the newest plan."""
    plans = reader.plans()
    servers = plans[-1].servers if plans else ()
    return {one.slot: Bucket(*astuple(one)[1:]) for one in servers}


def buckets(
    shapes: Mapping[str, Bucket],
    slots: Sequence[SlotRecord],
    ways: Sequence[TurnPlacement],
    samples: Sequence[SampleRecord],
) -> list[BucketPart]:
    """Return one entry for each bucket, that of the shortest trajectories first."""
    order = sorted(set(shapes.values()), key=lambda bucket: (bucket.up_to_tokens, bucket.name))
    return [_bucket(bucket, shapes, slots, ways, samples) for bucket in order]


def _bucket(
    bucket: Bucket,
    shapes: Mapping[str, Bucket],
    slots: Sequence[SlotRecord],
    ways: Sequence[TurnPlacement],
    samples: Sequence[SampleRecord],
) -> BucketPart:
    mine = {slot for slot, other in shapes.items() if other == bucket}
    rows = [slot for slot in slots if slot.slot in mine and slot.role == "rollout"]
    moves = [w for w in ways if w.moved_from and (w.slot in mine) != (w.moved_from in mine)]
    return BucketPart(
        bucket=bucket.name,
        up_to_tokens=bucket.up_to_tokens,
        servers=len(mine),
        seats=len(mine) * bucket.max_num_seqs,
        running=sum(slot.running for slot in rows),
        waiting=sum(slot.waiting for slot in rows),
        occupancy=mean(sample.occupancy for sample in samples if sample.slot in mine),
        turns=_turns(way for way in ways if way.slot in mine),
        moved_in=_turns(way for way in moves if way.slot in mine),
        moved_out=_turns(way for way in moves if way.moved_from in mine),
    )


def placement(ways: Sequence[TurnPlacement]) -> Placement:
    """Count the turns that followed another, and those of them that went on at another server."""
    turns, moved = _turns(w for w in ways if not w.first), _turns(w for w in ways if w.moved_from)
    return Placement(turns, moved, moved / turns if turns else None)


def _turns(ways: Iterable[TurnPlacement]) -> int:
    return sum(way.turns for way in ways)
