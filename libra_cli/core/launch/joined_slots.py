"""Slots of a node joined into one larger slot: its name, and what it has.

A joined slot has the GPUs of its parts, or their share of the node's cores, and is called after
them: ``gpu-01/0+1``. It serves; to train, it is split first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from libra_cli.core.types import Plan, Pool, Slot, SlotId, devices_of, node_of, parts_of


def part_slots(slot: SlotId) -> tuple[SlotId, ...]:
    """Return the slots that a slot is joined of, in order; only itself if it is not joined."""
    return tuple(f"{node_of(slot)}/{part}" for part in parts_of(slot)) or (slot,)


def slot_named(slot: SlotId, known: Mapping[SlotId, Slot]) -> Slot:
    """The slot of that name, which ``known`` has, or all of its parts.

    Raises:
        KeyError: a part is not known.
    """
    if slot in known:
        return known[slot]
    parts = [known[part] for part in part_slots(slot)]
    gpus = tuple(gpu for part in parts for gpu in part.gpus)
    return Slot(slot, node_of(slot), gpus, Pool.ROLLOUT)


def with_slots(slots: Sequence[Slot], wanted: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return the slots, with the given ones in the place of those that they overlap."""
    ended = [slot for slot in slots if any(slot.overlaps(other) for other in wanted)]
    place = slots.index(ended[0]) if ended else len(slots)
    rest = (slot for slot in slots[place:] if slot not in ended)
    return (*slots[:place], *wanted, *rest)


def slots_in(plan: Plan, slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return the slots of a recipe as the plan has them: some of them joined."""
    known, found = {slot.id: slot for slot in slots}, tuple(slots)
    for slot, _ in plan.servers:
        if len(parts_of(slot)) > 1:
            found = with_slots(found, [slot_named(slot, known)])
    return found


def reshaped(
    slots: Sequence[Slot], base: Sequence[Slot], sizes: Collection[int], may: Collection[SlotId]
) -> Iterator[tuple[Slot, ...]]:
    """The slots with one more that is joined, or all that can be, and with one fewer, or none.

    ``base`` are those of the recipe, ``sizes`` the GPUs that servers have, ``may`` the slots that
    may end. Slots are joined in aligned runs, so that those of one size never overlap.
    """
    known = {slot.id: slot for slot in base}
    larger = [[slot_named(run, known)] for run in _runs(base, sizes)]
    parts = [[known[part] for part in part_slots(slot.id)] for slot in slots if slot.is_joined]
    smaller = [apart for apart in parts if apart[0].num_devices in sizes]
    for changes in (larger, smaller):
        steps = _changed(tuple(slots), changes, may)
        if steps:
            yield steps[0]
        if len(steps) > 1:
            yield steps[-1]


def _changed(
    slots: tuple[Slot, ...], changes: Iterable[Sequence[Slot]], may: Collection[SlotId]
) -> list[tuple[Slot, ...]]:
    """The slots after the first change that can be made, after the second, and so on."""
    steps: list[tuple[Slot, ...]] = []
    for wanted in changes:
        ended = [slot for slot in slots if any(slot.overlaps(other) for other in wanted)]
        if all(slot.id in may for slot in ended) and _devices(ended) == _devices(wanted):
            slots = with_slots(slots, wanted)
            steps.append(slots)
    return steps


def _devices(slots: Iterable[Slot]) -> frozenset[tuple[str, int | str]]:
    return frozenset(device for slot in slots for device in devices_of(slot))


def _runs(base: Sequence[Slot], sizes: Collection[int]) -> Iterator[SlotId]:
    """Names of the joined slots of these sizes whose parts are of one pool."""
    pools = {slot.id: slot.pool for slot in base}
    for size in sorted(sizes):
        for slot in base:
            number, over = divmod(size, slot.num_devices)
            first = slot.parts[0]
            run = f"{slot.node}/{'+'.join(str(first + index) for index in range(number))}"
            whole = number > 1 and not over and first % number == 0
            if whole and {pools.get(part) for part in part_slots(run)} == {slot.pool}:
                yield run
