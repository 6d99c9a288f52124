"""A split asked for by hand: ``rollout=3,gradient=1`` and pins -> a plan, or why there is none.

Slots that already do what is asked stay; of the others, in the order of the recipe, first the
trainer group is filled, then the gradient workers, then the servers. A role that is not named
keeps the number of slots it has, if what is left goes up; otherwise one role that is not named
takes what is left. A joined slot is one slot, and serves.

Guarantee: a plan this returns can be carried out as far as the recipe tells. Limit: whether the
memory suffices is seen when a process starts there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from libra_cli.config.errors import InputError
from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import PlanError, plan_with
from libra_cli.core.types import Plan, Pool, Role, Slot, SlotId, node_of

ROLES = (Role.TRAIN, Role.GRADIENT, Role.ROLLOUT)


class OrderRefused(InputError):
    """The order cannot be carried out; the message says why."""


def ordered_plan(
    recipe: Recipe,
    slots: Sequence[Slot],
    roles: Mapping[SlotId, Role],
    trainer: Sequence[SlotId],
    to: Mapping[Role, int],
    pins: Mapping[SlotId, Role],
) -> Plan:
    """Return the plan nearest to ``roles`` with as many slots of each role as ``to`` says.

    Raises:
        OrderRefused: the numbers, the pools, the pins, a minimum or the recipe's buckets forbid it.
    """
    counts = _counts(slots, roles, to, pins)
    fixed = _fixed(slots, pins)
    chosen = _assign(slots, roles, counts, fixed)
    _check(recipe, slots, chosen, trainer)
    train = [slot for slot in trainer if chosen[slot] is Role.TRAIN]
    train += [s.id for s in slots if chosen[s.id] is Role.TRAIN and s.id not in trainer]
    gradient = frozenset(slot for slot, role in chosen.items() if role is Role.GRADIENT)
    try:
        plan = plan_with(recipe, tuple(slots), frozenset(train), _words(counts), gradient=gradient)
    except PlanError as error:
        raise OrderRefused(str(error)) from error
    return replace(plan, train=tuple(train))


def _counts(
    slots: Sequence[Slot],
    roles: Mapping[SlotId, Role],
    to: Mapping[Role, int],
    pins: Mapping[SlotId, Role],
) -> dict[Role, int]:
    target = {slot.id: pins.get(slot.id, roles[slot.id]) for slot in slots}
    counts = {role: sum(now is role for now in target.values()) for role in ROLES}
    strange = [role for role in to if role not in ROLES]
    if strange:
        raise OrderRefused(
            f"slots cannot be ordered to be {strange[0]}; they can be {_list(ROLES)}"
        )
    if not to:
        counts[Role.ROLLOUT] += len(slots) - sum(counts.values())
        return counts
    open_roles = [role for role in (Role.ROLLOUT, Role.GRADIENT) if role not in to]
    counts |= to
    if open_roles:
        named = sum(number for role, number in counts.items() if role is not open_roles[0])
        counts[open_roles[0]] = len(slots) - named
    total = sum(counts.values())
    if total != len(slots) or min(counts.values()) < 0:
        raise OrderRefused(f"{_words(counts)} are {total} slots, and the run has {len(slots)}")
    return counts


def _fixed(slots: Sequence[Slot], pins: Mapping[SlotId, Role]) -> dict[SlotId, Role]:
    fixed: dict[SlotId, Role] = {}
    for slot in slots:
        pin = pins.get(slot.id)
        if pin is not None and pin not in ROLES:
            raise OrderRefused(
                f"slot {slot.id} cannot be pinned to {pin}; it can to {_list(ROLES)}"
            )
        own = {Pool.ROLLOUT: Role.ROLLOUT, Pool.TRAIN: Role.TRAIN}.get(slot.pool)
        if pin is not None and own not in (None, pin):
            raise OrderRefused(
                f"slot {slot.id} is of pool {slot.pool}: it cannot be pinned to {pin}"
            )
        role = pin or own
        if role is not None:
            fixed[slot.id] = role
    return fixed


def _assign(
    slots: Sequence[Slot],
    roles: Mapping[SlotId, Role],
    counts: Mapping[Role, int],
    fixed: Mapping[SlotId, Role],
) -> dict[SlotId, Role]:
    left = dict(counts)
    for role in fixed.values():
        left[role] -= 1
    for role, number in left.items():
        if number < 0:
            held = counts[role] - number
            raise OrderRefused(
                f"{role}={counts[role]} is asked for, and pools and pins hold {held} slots there"
            )
    chosen = dict(fixed)
    free = [slot.id for slot in slots if slot.id not in fixed]
    for slot in free:
        if left.get(roles[slot], 0) > 0:
            chosen[slot] = roles[slot]
            left[roles[slot]] -= 1
    for slot in free:
        if slot not in chosen:
            chosen[slot] = next(role for role in ROLES if left[role] > 0)
            left[chosen[slot]] -= 1
    return chosen


def _check(
    recipe: Recipe, slots: Sequence[Slot], chosen: Mapping[SlotId, Role], trainer: Sequence[SlotId]
) -> None:
    serving = sum(len(s.parts) or 1 for s in slots if chosen[s.id] is Role.ROLLOUT)
    least = recipe.planner.min_rollout
    if serving < least:
        raise OrderRefused(
            f"{serving} slots would serve, and planner.min_rollout is {least}: without servers "
            "nothing is left to train on"
        )
    head = node_of(trainer[0])
    if chosen[trainer[0]] is not Role.TRAIN:
        raise OrderRefused(
            f"slot {trainer[0]} holds the trainer's first rank, which publishes the weights: "
            f"it stays on {head} for the whole run"
        )
    with_gpus = {bool(s.gpus) for s in slots if chosen[s.id] in (Role.TRAIN, Role.GRADIENT)}
    if len(with_gpus) > 1:
        raise OrderRefused("slots with GPUs and without cannot train together")


def _list(roles: Sequence[Role]) -> str:
    return ", ".join(roles)


def _words(counts: Mapping[Role, int]) -> str:
    return ", ".join(f"{role}={counts[role]}" for role in (Role.ROLLOUT, Role.GRADIENT, Role.TRAIN))
