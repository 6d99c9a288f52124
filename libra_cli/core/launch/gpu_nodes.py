"""Which GPUs a server, a gradient worker and the trainer's base group get on nodes without slots.

Servers have a power of two of GPUs and stand on an aligned run of them, so that what is free never
falls into pieces too small for a larger one: sizes divide one another, and of the runs of a size
each server takes as many as its own size holds, wherever it stands. A server that was there before
stays; where no run is free for a larger one, smaller ones make way. The base group has as many
ranks on each of its nodes, the last GPUs of them, and rank 0 is on the last of the largest nodes.
What is left of each node is a gradient worker.

Guarantee: no GPU has two tenants; a slot's name tells its node and GPUs, so two slots of one name
are one slot. Limit: a worker stops when one of its GPUs is needed for a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from libra_cli.core.types import Pool, Slot, SlotId

Gpu: TypeAlias = tuple[str, int]
"""A GPU: its node's name, and its index there."""
MAX_DEGREE = 8
"""The most GPUs of a server: those that one machine joins well."""
WORKER, BASE = "train", "base"


@dataclass(frozen=True, slots=True)
class GpuNodes:
    """Names and numbers of GPUs of the nodes, in the order in which they are filled."""

    nodes: tuple[tuple[str, int], ...]

    @classmethod
    def of_eight(cls, gpus: int) -> GpuNodes:
        """Nodes of eight GPUs each; the last node has the rest."""
        firsts = range(0, gpus, MAX_DEGREE)
        return cls(tuple((f"node-{n // MAX_DEGREE}", min(MAX_DEGREE, gpus - n)) for n in firsts))

    @property
    def gpus(self) -> int:
        return sum(number for _, number in self.nodes)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees of servers for which some node has room."""
        most = max(number for _, number in self.nodes)
        return tuple(degree for degree in (1, 2, 4, MAX_DEGREE) if degree <= most)

    @property
    def head(self) -> str:
        """The node of the trainer's first rank: the last of the largest."""
        return max(reversed(self.nodes), key=lambda node: node[1])[0]

    def without(self, names: Collection[str]) -> GpuNodes:
        """Return the other nodes."""
        return GpuNodes(tuple(node for node in self.nodes if node[0] not in names))

    def rest(self, taken: Iterable[Slot]) -> list[Slot]:
        """Return a slot of what is not taken of each node."""
        held = gpus_of(taken)
        free = [gpu for node in self.nodes for gpu in _gpus_of(node) if gpu not in held]
        return _of_nodes(free, Pool.HYBRID, WORKER)

    # -- the trainer's base group ---------------------------------------------------------------

    def base(self, least: int, most: int) -> tuple[Slot, ...]:
        """The smallest world of ``bases``, of two as small the one on fewer nodes. Empty: none."""
        return next(self.bases(least, most), ())

    def bases(self, least: int, most: int) -> Iterator[tuple[Slot, ...]]:
        """Worlds of ``least`` to ``most`` ranks, the smallest first: on every number of nodes the
        smallest with as many ranks on each of them, of which the head is one."""
        for world, nodes in sorted(self._worlds(max(1, least), most)):
            ranks = world // nodes
            others = [node for node in reversed(self._with(ranks)) if node[0] != self.head]
            held = [(self.head, dict(self.nodes)[self.head]), *others[: nodes - 1]]
            yield tuple(
                _slot(name, range(number - ranks, number), Pool.TRAIN, BASE)
                for name, number in held
            )

    def last(self, ranks: int) -> tuple[Slot, ...]:
        """The last ``ranks`` GPUs of all, however many that is on each node."""
        gpus = [gpu for node in self.nodes for gpu in _gpus_of(node)]
        return tuple(_of_nodes(gpus[len(gpus) - ranks :], Pool.TRAIN, BASE))

    def _worlds(self, least: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield (ranks of the base group, nodes that hold them), for each
        world of ``least`` to ``most`` ranks.
        """
        for nodes, _ in enumerate(self.nodes, 1):
            ranks = -(-least // nodes)
            if ranks * nodes <= most and len(self._with(ranks)) >= nodes:
                yield ranks * nodes, nodes

    def _with(self, gpus: int) -> list[tuple[str, int]]:
        return [node for node in self.nodes if node[1] >= gpus]

    # -- servers and workers --------------------------------------------------------------------

    def has_room(self, servers: Mapping[int, int], taken: Iterable[Slot]) -> bool:
        """Whether so many servers of each degree stand beside slots that keep their GPUs."""
        held = gpus_of(taken)
        for degree in servers:
            wanted = sum(size // degree * n for size, n in servers.items() if size >= degree)
            if wanted > sum(1 for _ in self._runs(degree, held)):
                return False
        return True

    def room(self, degree: int, taken: Iterable[Slot]) -> int:
        """The most servers of one degree beside slots that keep their GPUs."""
        return sum(1 for _ in self._runs(degree, gpus_of(taken)))

    def servers(
        self,
        wanted: Mapping[int, int],
        taken: Iterable[Slot],
        before: Sequence[Slot] = (),
        pinned: Collection[SlotId] = (),
    ) -> list[Slot]:
        """Slots of so many servers of each degree, for which there must be room.

        Those of ``before`` stay as far as they are wanted, the ``pinned`` first. Of others whole
        nodes are left where that is possible: a gradient worker may need one.
        """
        left, held, kept = Counter(wanted), gpus_of(taken), list[Slot]()
        going = _whole_nodes(before, left, pinned)
        for slot in sorted(before, key=lambda slot: (slot.id not in pinned, slot.id in going)):
            if left[len(slot.gpus)] > 0 and held.isdisjoint(gpus_of([slot])):
                left[len(slot.gpus)] -= 1
                kept.append(slot)
        for degree in sorted(left.elements(), reverse=True):
            kept = self._make_room(kept, degree, held)
        order = {name: place for place, (name, _) in enumerate(self.nodes)}
        return sorted(kept, key=lambda slot: (len(slot.gpus), order[slot.node], slot.gpus))

    def workers(
        self, taken: Sequence[Slot], before: Iterable[Slot], *, least: int = 1
    ) -> list[Slot]:
        """Gradient workers on what is not taken: those of ``before`` whose GPUs are still free,
        and one on the rest of each node that has ``least`` or more."""
        held = gpus_of(taken)
        kept = [slot for slot in before if held.isdisjoint(gpus_of([slot]))]
        more = self.rest((*taken, *kept))
        return kept + [slot for slot in more if len(slot.gpus) >= least]

    def _runs(self, degree: int, held: set[Gpu]) -> Iterator[tuple[str, range]]:
        """Aligned runs of so many GPUs of which none is held."""
        for name, number in self.nodes:
            for start in range(0, number - degree + 1, degree):
                run = range(start, start + degree)
                if held.isdisjoint((name, gpu) for gpu in run):
                    yield name, run

    def _make_room(self, kept: list[Slot], degree: int, held: set[Gpu]) -> list[Slot]:
        """Place one more server of ``degree`` GPUs, where the fewest
        other servers must be moved for it.
        """
        owner = {gpu: slot for slot in kept for gpu in gpus_of([slot])}
        large = sum(number for _, number in self.nodes)

        def tenants(place: tuple[str, range]) -> list[Slot]:
            hit = {slot.id: slot for gpu in place[1] if (slot := owner.get((place[0], gpu)))}
            return list(hit.values())

        def cost(place: tuple[str, range]) -> int:
            sizes = [len(slot.gpus) for slot in tenants(place)]
            return sum(size + large * (size >= degree) for size in sizes)

        runs = list(self._runs(degree, held))
        free = (place for place in runs if not tenants(place))
        node, run = best = next(free, None) or min(runs, key=cost)
        evicted = tenants(best)
        rest = [slot for slot in kept if slot not in evicted]
        slot = Slot(f"{node}/{run.start}x{degree}", node, tuple(run), Pool.HYBRID)
        placed = [*rest, slot]
        for smaller in sorted(evicted, key=lambda slot: -len(slot.gpus)):
            placed = self._make_room(placed, len(smaller.gpus), held)
        return placed


def _whole_nodes(
    before: Sequence[Slot], wanted: Counter[int], pinned: Collection[SlotId]
) -> set[SlotId]:
    """Return servers to be stopped that leave a node with no others, the largest nodes first."""
    spare = Counter(len(slot.gpus) for slot in before) - wanted
    nodes: dict[str, list[Slot]] = {}
    for slot in before:
        nodes.setdefault(slot.node, []).append(slot)
    going: set[SlotId] = set()
    last_first = list(nodes.values())[::-1]
    for slots in sorted(last_first, key=lambda slots: -len(gpus_of(slots))):
        sizes = Counter(len(slot.gpus) for slot in slots)
        if sizes <= spare and not any(slot.id in pinned for slot in slots):
            spare -= sizes
            going |= {slot.id for slot in slots}
    return going


def gpus_of(slots: Iterable[Slot]) -> set[Gpu]:
    return {(slot.node, gpu) for slot in slots for gpu in slot.gpus}


def is_worker(slot: Slot) -> bool:
    """Whether the slot is what servers left of a node."""
    return slot.id.rpartition("/")[2].startswith(WORKER)


def _gpus_of(node: tuple[str, int]) -> list[Gpu]:
    return [(node[0], gpu) for gpu in range(node[1])]


def _of_nodes(gpus: Iterable[Gpu], pool: Pool, kind: str) -> list[Slot]:
    """A slot for what each node has of these GPUs."""
    by_node: dict[str, list[int]] = {}
    for node, gpu in gpus:
        by_node.setdefault(node, []).append(gpu)
    return [_slot(node, held, pool, kind) for node, held in by_node.items()]


def _slot(node: str, gpus: Iterable[int], pool: Pool, kind: str) -> Slot:
    held = tuple(gpus)
    return Slot(f"{node}/{kind}-{'.'.join(map(str, held))}", node, held, pool)
