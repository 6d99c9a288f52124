"""Which GPUs of which node a layout's servers get: the step from counts to slots.

Large servers first, each on an aligned run of GPUs of one node. A server of a shape that was there
before stays where it is; where no run is free for a larger one, smaller ones make way. What is
left trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from libra_cli.core.planning.rollout_dp import PlannedBucket
from libra_cli.core.planning.search import Layout
from libra_cli.core.types import Bucket, Plan, Pool, Slot, SlotId

NODE_GPUS = 8
TRAINER: SlotId = "train/0"


def plan_of(
    layout: Layout, gpus: int, *, max_len: int, before: Sequence[Slot] = ()
) -> tuple[Plan, tuple[Slot, ...]]:
    """A plan for this layout on nodes of eight GPUs, nearest to the slots of ``before``."""
    servers = _place(Counter(layout.servers), gpus, before)
    by_degree = _buckets(layout, max_len)
    chosen = tuple((slot.id, by_degree[len(slot.gpus)]) for slot in servers)
    taken = {gpu for slot in servers for gpu in slot.gpus}
    training = tuple(gpu for gpu in range(gpus) if layout.colocated or gpu not in taken)
    trainer = Slot(TRAINER, "train", training, Pool.TRAIN)
    return Plan(chosen, (TRAINER,)), (*servers, trainer)


def _buckets(layout: Layout, max_len: int) -> dict[int, Bucket]:
    """One bucket a shape, short to long; the last one takes whatever is longer."""
    found: dict[int, PlannedBucket] = {}
    for bucket in layout.buckets:
        held = found.get(bucket.tensor_parallel)
        if held is None or bucket.up_to_tokens > held.up_to_tokens:
            found[bucket.tensor_parallel] = bucket
    longest = max(bucket.up_to_tokens for bucket in layout.buckets)
    return {
        degree: Bucket(
            name=f"TP{degree}",
            tensor_parallel=degree,
            max_num_seqs=bucket.max_num_seqs,
            up_to_tokens=max_len if bucket.up_to_tokens == longest else bucket.up_to_tokens,
        )
        for degree, bucket in found.items()
    }


def _place(wanted: Counter[int], gpus: int, before: Sequence[Slot]) -> list[Slot]:
    """Slots for so many servers of each degree; GPU numbers count through all nodes."""
    kept: list[Slot] = []
    for slot in before:
        if slot.pool is not Pool.TRAIN and wanted[len(slot.gpus)] > 0:
            wanted[len(slot.gpus)] -= 1
            kept.append(slot)
    for degree in sorted(wanted.elements(), reverse=True):
        kept = _make_room(kept, degree, gpus)
    return sorted(kept, key=lambda slot: (len(slot.gpus), slot.gpus))


def _make_room(kept: list[Slot], degree: int, gpus: int) -> list[Slot]:
    """One more server, on the run of GPUs where the fewest must make way for it."""

    def cost(start: int) -> tuple[int, int]:
        run = set(range(start, start + degree))
        hit = [slot for slot in kept if run & set(slot.gpus)]
        larger = sum(len(slot.gpus) >= degree for slot in hit)
        return larger * gpus + sum(len(slot.gpus) for slot in hit), start

    start = min(range(0, gpus - degree + 1, degree), key=cost)
    run = tuple(range(start, start + degree))
    evicted = [slot for slot in kept if set(run) & set(slot.gpus)]
    node = f"node-{start // NODE_GPUS}"
    slot = Slot(f"{node}/{start % NODE_GPUS}x{degree}", node, run, Pool.ROLLOUT)
    rest = [slot for slot in kept if slot not in evicted]
    placed = [*rest, slot]
    for smaller in sorted(evicted, key=lambda slot: -len(slot.gpus)):
        placed = _make_room(placed, len(smaller.gpus), gpus)
    return placed
