"""The placements that GPUs allow: servers of any shape on their nodes, and what is left trains.

Where servers and gradient workers stand is for ``cluster.gpu_nodes`` to say. A bench has nodes of
eight GPUs, of which the last ``base_gpus`` are the trainer's base group at first. The open nodes of
a recipe have names and sizes of their own (``nodes``). Their base group is small, so that the rest
can change sides: the head node, or as many GPUs as the trainer's memory needs, the same number on
each node; or as many as pay, since a gradient worker has versions to load and gradients to send
(``TrainingTable.base_group``). Where a plan has too few GPUs left for it, or a larger one pays its
restart, it is made anew.

Guarantee: no GPU has two tenants; servers that keep their shape stay, and pinned slots keep their
roles; on nodes that are given up there is nothing else. On open nodes every trainer and worker has
the memory that the prices ask for. Limit: a worker stops when one of its GPUs is needed for a
server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from libra_cli.core.costs.profile import NothingFits, Profile
from libra_cli.core.launch.gpu_nodes import GpuNodes, gpus_of, is_worker
from libra_cli.core.observation import Observation
from libra_cli.core.planning.planner import Candidate, SlotMove, lacks_hosts, roles_of
from libra_cli.core.planning.rollout_table import PlannedBucket, planned_buckets
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.planning.training_table import TrainingTable
from libra_cli.core.planning.transition import change_cost_s, moves_between
from libra_cli.core.types import Bucket, Plan, Pool, Role, Seconds, Slot, SlotId, Tokens

NODE_GPUS = 8
OFFERED = 32
"""Candidates at least: a plan whose steps are longer may pay, for it moves less. Chosen."""
COLOCATED: SlotId = "colocated/0"
"""The trainer's slot where every GPU serves and then trains, in turn."""


@dataclass(frozen=True, slots=True)
class TrainerNeeds:
    """The fewest ranks whose memory holds the trainer's base group, and a gradient worker;
    ``table`` tells what a base group is worth, where prices do."""

    base: int = 1
    worker: int = 1
    table: TrainingTable | None = None
    unpaid: str = ""
    """Why gradient workers do not pay, if their gradients travel too long; else empty."""

    def holds_base(self, ranks: int) -> bool:
        """Whether so many ranks have the memory for a base group; where it is unknown they do."""
        return self.table is None or self.table.fits(ranks)

    def holds_worker(self, slot: Slot) -> bool:
        """Whether the slot has the memory for a gradient worker; where it is unknown it does."""
        return self.table is None or self.table.worker_fits(len(slot.gpus))


@dataclass(frozen=True, slots=True)
class PinnedSlots:
    """Slots that are held to their roles: names of servers, and gradient workers; and the GPUs
    of nodes that are ``gone`` on which nothing is held, which are ``idle``."""

    servers: frozenset[SlotId] = frozenset()
    workers: tuple[Slot, ...] = ()
    idle: tuple[Slot, ...] = ()
    gone: frozenset[str] = frozenset()

    @classmethod
    def of(cls, now: Observation, grid: GpuNodes) -> PinnedSlots:
        """Return the slots that a run pins; those of the trainer never move."""
        pins = dict(now.pins)
        servers = frozenset(slot for slot, role in now.pins if role is Role.ROLLOUT)
        workers = (slot for slot in now.slots if pins.get(slot.id) is Role.GRADIENT)
        rest = grid.rest(slot for slot in now.slots if slot.id in pins)
        idle = (slot for slot in rest if slot.node in now.gone)
        return cls(servers, tuple(workers), tuple(idle), now.gone)


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """``gpus`` GPUs, of which the last ``base_gpus`` are the trainer's base group.

    ``max_len`` is in tokens; ``tolerance`` is that of the planner, within which layouts are
    offered. ``nodes`` are the open ones of a recipe, where the base group follows from memory
    instead and at least ``min_rollout`` servers stay; without, nodes of eight. ``elastic``: the run
    is under way, and slots stay. ``least_worker`` are the fewest GPUs of a gradient worker where no
    planner says so.
    """

    gpus: int
    base_gpus: int
    max_len: Tokens
    tolerance: float = 0.02
    nodes: GpuNodes | None = None
    min_rollout: int = 1
    elastic: bool = True
    least_worker: int = 1

    @classmethod
    def around(
        cls, layout: Layout, training: TrainingTable, *, max_len: Tokens, moves: bool
    ) -> GpuPlacement:
        """The space of a run that begins with this layout, on nodes of eight.

        Where nothing ever ``moves``, the base group is all that trains; else as small as pays, a
        node at least, so that the rest may move.
        """
        gpus = training.gpus
        spare = gpus - layout.rollout_gpus
        least = max(training.least() or gpus, NODE_GPUS)
        base = training.base_group(spare, least, NODE_GPUS) if moves else spare
        return cls(gpus, base, max_len, least_worker=training.least_worker() or gpus + 1)

    @classmethod
    def on(
        cls, nodes: GpuNodes, *, max_len: Tokens, min_rollout: int, elastic: bool
    ) -> GpuPlacement:
        """Return the placement space of a recipe's open nodes."""
        return cls(nodes.gpus, 1, max_len, nodes=nodes, min_rollout=min_rollout, elastic=elastic)

    def check(self, plan: Plan, profile: Profile) -> None:
        """Do nothing: every shape comes from the profile, so it has costs."""

    def layout_of(self, plan: Plan, slots: Sequence[Slot]) -> Layout:
        """The plan as numbers of servers and of ranks."""
        sizes = {slot.id: len(slot.gpus) for slot in slots}
        workers = tuple(sizes[slot] for slot in plan.gradient if slot in sizes)
        ranks = sum(sizes.get(slot, 0) for slot in plan.train) + sum(workers)
        return Layout(planned_buckets(plan), max(1, ranks), workers=workers if plan.train else ())

    def candidates(self, search: Search, now: Observation) -> Iterator[Candidate]:
        """Equal servers of every shape in every number, in the order of their best times.

        Raises:
            NothingFits: none of them stands on the nodes.
        """
        today = self.layout_of(now.plan, now.slots)
        found = [layout for layout, _ in search.layouts()]
        tried = (self._beside_what_fits(today, search.training), *found)
        offered = list(self._on_nodes(search, now, today, tried))
        if not offered and now.gone:
            raise lacks_hosts(now)
        if not offered:
            raise NothingFits(
                "nodes",
                f"no servers and trainer that fit {self.gpus} GPUs stand on the nodes as they are",
                hint="give nodes of one size, or fewer pins",
            )
        yield from offered

    def _on_nodes(
        self, search: Search, now: Observation, today: Layout, layouts: Sequence[Layout]
    ) -> Iterator[Candidate]:
        """Yield what layouts come to on the nodes, with their gradient workers.

        They are tried in the order of their best times, until no better one can come: GPUs that a
        node has no room for never make training faster.
        """
        needs, pinned = self._needs(search, now), PinnedSlots.of(now, self._grid)
        before = now.slots if self.elastic else ()
        working = self.layout_of(now.working(now.plan), now.slots)
        least_s, offered = float("inf"), 0
        for layout in self._by_best_time(search, layouts):
            best_s = search.times(layout).step_s
            if offered >= OFFERED and best_s > least_s * (1 + self.tolerance):
                return
            for plan, slots in self._placements(layout, before, pinned, needs):
                if not _keeps(now, plan):
                    continue
                real = self.layout_of(now.working(plan), slots)
                times, moves = search.times(real), moves_between(working, real)
                least_s, offered = min(least_s, times.step_s), offered + 1
                resized = plan.train != now.plan.train
                far = (resized, moves.gpus, moves.number) if self.elastic else ()
                reasons = self._reasons(self.layout_of(plan, slots), needs.unpaid, pinned.idle)
                place = partial(_placed, replace(plan, reasons=reasons), slots)
                yield Candidate(real, times, far, place)

    def _beside_what_fits(self, today: Layout, training: TrainingTable) -> Layout:
        """Return today's servers, beside the best trainer where theirs lacks the memory: with it
        their steps would never end, and other trainers beside them would be tried last."""
        best = training.best(self.gpus - today.rollout_gpus)
        if best is None or not training.lacking(today.base_gpus, today.workers):
            return today
        return replace(today, training_gpus=best.ranks, workers=())

    def _by_best_time(self, search: Search, layouts: Sequence[Layout]) -> list[Layout]:
        """Layouts with other servers each, those with the shortest steps first."""
        distinct: dict[tuple[tuple[int, int], ...], Layout] = {}
        for layout in layouts:
            if sum(layout.servers.values()) >= self.min_rollout:
                distinct.setdefault(tuple(layout.servers.items()), layout)
        return sorted(distinct.values(), key=lambda layout: search.times(layout).step_s)

    def _needs(self, search: Search, now: Observation) -> TrainerNeeds:
        """Return the GPUs that memory asks for; where sizes are
        unknown, those that are known to suffice.
        """
        if search.training.knows_memory:
            base = search.training.least() or 1
            why = search.training.unpaid(base)
            none = self.gpus + 1
            worker = none if why else search.training.least_worker() or none
            return TrainerNeeds(base, worker, search.training, why)
        ranks = sum(len(slot.gpus) for slot in now.slots if slot.id in now.plan.train)
        return TrainerNeeds(ranks, -(-ranks // 2))  # half the bytes, see WORKER_BYTES

    def _reasons(self, layout: Layout, unpaid: str, gone: Sequence[Slot]) -> tuple[str, ...]:
        away = len(gpus_of(gone))
        idle = self.gpus - layout.rollout_gpus - layout.training_gpus - away
        why = unpaid or "no server and no worker fits there"
        left = (f"{idle} GPUs are left over: {why}",) if idle else ()
        lost = (f"{away} GPUs are left over: their host is given up",) if away else ()
        return (str(layout), *left, *lost)

    def place(
        self, layout: Layout, before: Sequence[Slot] = (), needs: TrainerNeeds | None = None
    ) -> tuple[Plan, tuple[Slot, ...]]:
        """The plan for a layout, nearest to the slots of ``before``.

        Raises:
            NothingFits: it does not stand on the nodes.
        """
        if layout.colocated:
            return self._colocated(layout)
        needs = needs or TrainerNeeds(worker=self.least_worker)
        placed = self._placements(layout, before, PinnedSlots(), needs)
        for plan, slots in placed:
            return plan, slots
        raise NothingFits("nodes", f"the nodes have no room for {layout}")

    def _placements(
        self,
        layout: Layout,
        before: Sequence[Slot],
        pinned: PinnedSlots,
        needs: TrainerNeeds,
    ) -> Iterator[tuple[Plan, tuple[Slot, ...]]]:
        """Ways to place the layout: of the base groups of a kind, the one that leaves the fewest
        GPUs without work. None where it does not stand."""
        space = self._without(pinned.gone)
        if not space._grid.nodes:
            return
        for bases in space._bases(before, self.gpus - layout.rollout_gpus, needs):
            found = [self._beside(base, layout, before, pinned, needs) for base in bases]
            stand = [placed for placed in found if placed is not None]
            if stand:
                yield max(stand, key=lambda placed: sum(len(slot.gpus) for slot in placed[1]))

    def _beside(
        self,
        base: Sequence[Slot],
        layout: Layout,
        before: Sequence[Slot],
        pinned: PinnedSlots,
        needs: TrainerNeeds,
    ) -> tuple[Plan, tuple[Slot, ...]] | None:
        grid, fixed = self._grid, (*base, *pinned.workers, *pinned.idle)
        if not grid.has_room(layout.servers, fixed):
            return None
        hybrid = [s for s in before if s.pool is Pool.HYBRID and s not in pinned.workers]
        serving = [slot for slot in hybrid if not is_worker(slot)]
        servers = grid.servers(layout.servers, fixed, serving, pinned.servers)
        staying = [slot for slot in hybrid if is_worker(slot) and needs.holds_worker(slot)]
        taken = (*servers, *base, *pinned.idle)
        workers = grid.workers(taken, [*pinned.workers, *staying], least=needs.worker)
        by_degree = _buckets(layout, self.max_len)
        plan = Plan(
            servers=tuple((slot.id, by_degree[len(slot.gpus)]) for slot in servers),
            train=tuple(slot.id for slot in base),
            gradient=tuple(slot.id for slot in workers),
            reasons=(str(layout),),
        )
        return plan, (*servers, *workers, *base)

    def _without(self, gone: frozenset[str]) -> GpuPlacement:
        """Return the space of the recipe's other nodes, on which a new base group may be."""
        return self if self.nodes is None else replace(self, nodes=self.nodes.without(gone))

    @property
    def _grid(self) -> GpuNodes:
        return self.nodes or GpuNodes.of_eight(self.gpus)

    def _bases(
        self, before: Sequence[Slot], spare: int, needs: TrainerNeeds
    ) -> Iterator[Sequence[Sequence[Slot]]]:
        """Base groups to have where ``spare`` GPUs do not serve, by kind: that which there is, or
        the one to begin with, if it has the memory; and one as large as pays, at the price of a
        restart."""
        held = [slot for slot in before if slot.pool is Pool.TRAIN]
        size = sum(len(slot.gpus) for slot in held)
        if held and size <= spare and needs.holds_base(size):
            yield [held]
        elif self.nodes is None and self.base_gpus <= spare and needs.holds_base(self.base_gpus):
            yield [self._grid.last(self.base_gpus)]
        elif self.nodes is not None:
            yield list(self._small_bases(self.nodes, spare, needs, held=bool(held)))
        worth = self._worth(spare, needs)
        if worth and (worth != size if held else self.nodes is not None):
            grid = self._grid
            yield [grid.last(worth)] if self.nodes is None else list(grid.bases(worth, spare))

    def _small_bases(
        self, nodes: GpuNodes, spare: int, needs: TrainerNeeds, *, held: bool
    ) -> Iterator[Sequence[Slot]]:
        """Yield base groups of as many ranks as memory needs, and of the head node if that is more.

        The head node comes first where there is no base group yet.
        """
        head = min(spare, dict(nodes.nodes)[nodes.head])
        sizes = (needs.base, max(needs.base, head))
        for least in sizes if held else reversed(sizes):
            yield from nodes.bases(least, spare)

    def _worth(self, spare: int, needs: TrainerNeeds) -> int:
        """Ranks of a base group that are worth not being able to change sides; 0: not known."""
        if needs.table is None or spare < needs.base:
            return 0
        head = dict(self._grid.nodes)[self._grid.head]
        return needs.table.base_group(spare, max(needs.base, min(head, spare)), head)

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

    def cost_s(self, now: Observation, chosen: Candidate, then: Plan, search: Search) -> Seconds:
        """Return the cost of the moves, in seconds of the whole job,
        with a restart of the base group.
        """
        _, slots = chosen.place()
        return change_cost_s(self.layout_of, search, now, then, slots, restarts=self.elastic)

    def _colocated(self, layout: Layout) -> tuple[Plan, tuple[Slot, ...]]:
        servers = self._grid.servers(layout.servers, ())
        by_degree = _buckets(layout, self.max_len)
        # A node of its own: the two halves hold the same GPUs, one after the other.
        trainer = Slot(COLOCATED, "colocated", tuple(range(self.gpus)), Pool.TRAIN)
        chosen = tuple((slot.id, by_degree[len(slot.gpus)]) for slot in servers)
        return Plan(chosen, (COLOCATED,)), (*servers, trainer)


def _placed(plan: Plan, slots: tuple[Slot, ...]) -> tuple[Plan, tuple[Slot, ...]]:
    return plan, slots


def _keeps(now: Observation, plan: Plan) -> bool:
    """Whether pinned slots do what they are pinned to."""
    roles = dict.fromkeys(dict(plan.servers), Role.ROLLOUT)
    roles |= dict.fromkeys(plan.train, Role.TRAIN) | dict.fromkeys(plan.gradient, Role.GRADIENT)
    return all(roles.get(slot) is role for slot, role in now.pins)


def _buckets(layout: Layout, max_len: int) -> dict[int, Bucket]:
    """Return one bucket a shape, by degree; the one for the longest takes whatever is longer."""
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
