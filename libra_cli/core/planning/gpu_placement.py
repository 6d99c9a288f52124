"""The placements that GPUs allow: servers of any shape on nodes of eight, and what is left trains.

Large servers first, each on an aligned run of GPUs of one node. A server of a shape that was there
before stays where it is; where no run is free for a larger one, smaller ones make way. The base
group of the trainer keeps its GPUs, the last ones, for the whole run. What is left of each node is
a gradient worker.

Guarantee: no GPU has two tenants; servers that keep their shape stay. Limit: the trainer keeps its
tensor-parallel degree, and a worker stops when one of its GPUs is needed for a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from libra_cli.core.costs.profile import Profile, TrainingShape
from libra_cli.core.observation import Observation
from libra_cli.core.planning.planner import Candidate, SlotMove, roles_of
from libra_cli.core.planning.rollout_dp import PlannedBucket, planned_buckets
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.planning.transition import moves_between, moves_cost_s
from libra_cli.core.types import Bucket, Plan, Pool, Seconds, Slot, SlotId, Tokens

NODE_GPUS = 8
COLOCATED: SlotId = "colocated/0"
"""The trainer's slot where every GPU serves and then trains, in turn."""


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """``gpus`` GPUs, of which the last ``base_gpus`` are the trainer's base group.

    ``tensor_parallel`` is the degree of every replica of the trainer; ``max_len`` is in tokens;
    ``tolerance`` is that of the planner, within which layouts are offered.
    """

    gpus: int
    base_gpus: int
    tensor_parallel: int
    max_len: Tokens
    tolerance: float = 0.02

    @classmethod
    def around(
        cls, layout: Layout, gpus: int, *, max_len: Tokens, least: int, moves: bool
    ) -> GpuPlacement:
        """The space of a run that begins with this layout.

        ``least`` is the smallest number of GPUs that training fits on. Where nothing ever
        ``moves``, the base group is all that trains; else a node, so that the rest may move.
        """
        degree = layout.training.tensor_parallel
        spare = gpus - layout.rollout_gpus
        base = min(spare, max(least, NODE_GPUS)) if moves else spare
        return cls(gpus, base // degree * degree or spare, degree, max_len)

    @property
    def settings(self) -> PlannerSettings:
        """What the planner may do here: the trainer's degree is fixed."""
        return PlannerSettings(training_shapes=(self.tensor_parallel,))

    def check(self, plan: Plan, profile: Profile) -> None:
        """Every shape comes from the profile, so it has costs."""

    def layout_of(self, plan: Plan, slots: Sequence[Slot]) -> Layout:
        """The plan as numbers of servers and of ranks."""
        trains = {*plan.train, *plan.gradient}
        ranks = sum(len(slot.gpus) for slot in slots if slot.id in trains)
        replicas = max(1, ranks // self.tensor_parallel)
        return Layout(
            planned_buckets(plan),
            TrainingShape(tensor_parallel=self.tensor_parallel, data_parallel=replicas),
        )

    def candidates(self, search: Search, now: Observation) -> Iterator[Candidate]:
        """The best layouts, those as good, and today's with a few servers more or fewer."""
        today = self.layout_of(now.plan, now.slots)
        best = search.best()
        found = [(best.layout, best.times), *search.candidates(self.tolerance)]
        found += [(layout, search.times(layout)) for layout in _neighbours(search, today)]
        for layout, times in found:
            if self.gpus - layout.rollout_gpus >= self.base_gpus:
                moves = moves_between(today, layout)
                place = partial(self.place, layout, now.slots)
                yield Candidate(layout, times, (moves.gpus, moves.number), place)

    def place(self, layout: Layout, before: Sequence[Slot] = ()) -> tuple[Plan, tuple[Slot, ...]]:
        """The plan for a layout, nearest to the slots of ``before``."""
        if layout.colocated:
            return self._colocated(layout)
        base = [slot for slot in before if slot.pool is Pool.TRAIN] or _of_nodes(
            range(self.gpus - self.base_gpus, self.gpus), Pool.TRAIN, "base"
        )
        hybrid = [slot for slot in before if slot.pool is Pool.HYBRID]
        serving = [slot for slot in hybrid if not _is_worker(slot)]
        servers = _place(Counter(layout.servers), self.gpus - self.base_gpus, serving)
        taken = {gpu for slot in (*servers, *base) for gpu in slot.gpus}
        workers = [s for s in hybrid if _is_worker(s) and taken.isdisjoint(s.gpus)]
        taken |= {gpu for slot in workers for gpu in slot.gpus}
        free = [gpu for gpu in range(self.gpus) if gpu not in taken]
        workers += _of_nodes(free, Pool.HYBRID, _WORKER, multiple=self.tensor_parallel)
        by_degree = _buckets(layout, self.max_len)
        plan = Plan(
            servers=tuple((slot.id, by_degree[len(slot.gpus)]) for slot in servers),
            train=tuple(slot.id for slot in base),
            gradient=tuple(slot.id for slot in workers),
            reasons=(str(layout),),
        )
        return plan, (*servers, *workers, *base)

    def moves(
        self, now: Observation, then: Plan, slots: Sequence[Slot], profile: Profile
    ) -> tuple[SlotMove, ...]:
        """The slots whose role changes: those of today's that end, and new ones."""
        before, after = roles_of(now.plan), roles_of(then)
        sizes = {slot.id: len(slot.gpus) for slot in (*now.slots, *slots)}
        return tuple(
            SlotMove(slot, before.get(slot, "idle"), role, profile.moves.start(sizes[slot]))
            for slot in sorted(before.keys() | after.keys())
            if (role := after.get(slot, "idle")) != before.get(slot, "idle")
        )

    def cost_s(self, now: Observation, chosen: Candidate, then: Plan, profile: Profile) -> Seconds:
        """What the moves cost, in seconds of the whole job."""
        today = self.layout_of(now.plan, now.slots)
        return moves_cost_s(profile, now.workload, today, chosen.layout)

    def _colocated(self, layout: Layout) -> tuple[Plan, tuple[Slot, ...]]:
        servers = _place(Counter(layout.servers), self.gpus, ())
        by_degree = _buckets(layout, self.max_len)
        # A node of its own: the two halves hold the same GPUs, one after the other.
        trainer = Slot(COLOCATED, "colocated", tuple(range(self.gpus)), Pool.TRAIN)
        chosen = tuple((slot.id, by_degree[len(slot.gpus)]) for slot in servers)
        return Plan(chosen, (COLOCATED,)), (*servers, trainer)


_WORKER = "train"


def _is_worker(slot: Slot) -> bool:
    return slot.id.rpartition("/")[2].startswith(_WORKER)


def _of_nodes(gpus: Sequence[int], pool: Pool, name: str, *, multiple: int = 1) -> list[Slot]:
    """A slot for what each node has of these GPUs, in whole replicas of ``multiple`` GPUs."""
    by_node: dict[int, list[int]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu // NODE_GPUS, []).append(gpu)
    slots = []
    for index, held in by_node.items():
        whole = tuple(held[: len(held) // multiple * multiple])
        if whole:
            numbers = ".".join(str(gpu % NODE_GPUS) for gpu in whole)
            node = f"node-{index}"
            slots.append(Slot(f"{node}/{name}-{numbers}", node, whole, pool))
    return slots


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
        if wanted[len(slot.gpus)] > 0:
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
    slot = Slot(f"{node}/{start % NODE_GPUS}x{degree}", node, run, Pool.HYBRID)
    rest = [slot for slot in kept if slot not in evicted]
    placed = [*rest, slot]
    for smaller in sorted(evicted, key=lambda slot: -len(slot.gpus)):
        placed = _make_room(placed, len(smaller.gpus), gpus)
    return placed


def _neighbours(search: Search, today: Layout) -> list[Layout]:
    """Today's layout with one bucket a few servers larger or smaller, the rest training."""
    found: list[Layout] = []
    for index, bucket in enumerate(today.buckets):
        for change in (-4, -2, -1, 1, 2, 4):
            servers = bucket.servers + change
            kept = (replace(bucket, servers=servers),) if servers > 0 else ()
            buckets = (*today.buckets[:index], *kept, *today.buckets[index + 1 :])
            training = search.tree.best(search.gpus - sum(bucket.gpus for bucket in buckets))
            if buckets and training is not None:
                found.append(Layout(search.table.boundaries(buckets), training.shape))
    return found
