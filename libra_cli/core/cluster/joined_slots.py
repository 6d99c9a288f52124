"""Slots of a node joined into one larger slot: its name, and what it has.

A joined slot has the GPUs of its parts, or their share of the node's cores, and is called after
them: ``gpu-01/0+1``. It serves; to train, it is split first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libra_cli.core.types import Plan, Pool, Slot, SlotId, node_of, parts_of


def part_slots(slot: SlotId) -> tuple[SlotId, ...]:
    """The slots that a slot is joined of, in order; itself if it is not."""
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
    """The slots, with others in the place of those that these overlap."""
    ended = [slot for slot in slots if any(slot.overlaps(other) for other in wanted)]
    place = slots.index(ended[0]) if ended else len(slots)
    rest = (slot for slot in slots[place:] if slot not in ended)
    return (*slots[:place], *wanted, *rest)


def slots_in(plan: Plan, slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """The slots of a recipe as the plan has them: some of them joined."""
    known, found = {slot.id: slot for slot in slots}, tuple(slots)
    for slot, _ in plan.servers:
        if len(parts_of(slot)) > 1:
            found = with_slots(found, [slot_named(slot, known)])
    return found
