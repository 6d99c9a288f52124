"""Larger and smaller servers asked for by hand: slots of a node joined into one, or split again.

Guarantee: a plan this returns has every part of a node in one slot, and changes no slot that the
order does not name. Limit: as with every order, whether the memory suffices is seen when a server
starts there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import BucketSpec
from libra_cli.core.launch.joined_slots import part_slots, slot_named, with_slots
from libra_cli.core.launch.placement import PlanError, bucket_of_size, slots_of
from libra_cli.core.reconcile.manual_plan import OrderRefused
from libra_cli.core.types import Bucket, Plan, Role, Slot, SlotId, parts_of


def reshaped_plan(
    recipe: Recipe,
    slots: Sequence[Slot],
    plan: Plan,
    shapes: Sequence[tuple[SlotId, bool]],
    pins: Mapping[SlotId, Role],
) -> tuple[Plan, tuple[Slot, ...]]:
    """The plan with these joined slots (True) or without them (False), and its slots.

    Raises:
        OrderRefused: they are not slots that serve side by side on one node, are pinned, or the
            recipe has no servers of that size.
    """
    base = {slot.id: slot for slot in slots_of(recipe)}
    now = tuple(slots)
    for name, joined in shapes:
        wanted = _joined(name, base) if joined else _split(name, base, now)
        ended = [slot for slot in now if any(slot.overlaps(other) for other in wanted)]
        _check_slots(ended, wanted, plan, pins)
        bucket = _bucket(recipe, wanted[0])
        now = with_slots(now, wanted)
        shapes_now = dict(plan.servers) | {slot.id: bucket for slot in wanted}
        servers = tuple((slot.id, shapes_now[slot.id]) for slot in now if slot.id in shapes_now)
        why = f"{name} is {'one server' if joined else 'split again'}: ordered"
        plan = replace(plan, servers=servers, reasons=(why,))
    return plan, now


def _joined(name: SlotId, base: Mapping[SlotId, Slot]) -> tuple[Slot, ...]:
    parts = parts_of(name)
    if len(parts) < 2:
        raise OrderRefused(f"{name} names no slots to join; write them like gpu-01/0+1")
    unknown = [part for part in part_slots(name) if part not in base]
    if unknown:
        raise OrderRefused(f"there is no slot {unknown[0]}; the recipe has {', '.join(base)}")
    if parts != tuple(range(parts[0], parts[0] + len(parts))):
        raise OrderRefused(f"the slots of {name} are not neighbours, in the order of their numbers")
    pools = {base[part].pool for part in part_slots(name)}
    if len(pools) > 1:
        raise OrderRefused(f"the slots of {name} are of unlike pools: {', '.join(sorted(pools))}")
    return (slot_named(name, base),)


def _split(name: SlotId, base: Mapping[SlotId, Slot], slots: Sequence[Slot]) -> tuple[Slot, ...]:
    joined = [slot.id for slot in slots if slot.is_joined]
    if name not in joined:
        raise OrderRefused(f"there is no joined slot {name}; the run has {_list(joined)}")
    return tuple(base[part] for part in part_slots(name))


def _check_slots(
    ended: Sequence[Slot], wanted: Sequence[Slot], plan: Plan, pins: Mapping[SlotId, Role]
) -> None:
    parts = {part for slot in wanted for part in slot.parts}
    serving = dict(plan.servers)
    for slot in ended:
        if not parts.issuperset(slot.parts):
            raise OrderRefused(f"slot {slot.id} is joined already; --split {slot.id} first")
        if slot.id in pins:
            raise OrderRefused(f"slot {slot.id} is pinned; --pin {slot.id}=auto lets it go")
        if slot.id not in serving:
            raise OrderRefused(f"slot {slot.id} does not serve, and only servers change their size")


def _bucket(recipe: Recipe, slot: Slot) -> Bucket:
    try:
        buckets = recipe.rollout.buckets or (BucketSpec(),)
        return bucket_of_size(buckets, slot, max_len=recipe.model.max_len)
    except PlanError as error:
        raise OrderRefused(str(error)) from error


def _list(slots: Sequence[SlotId]) -> str:
    return ", ".join(slots) or "none"
