"""Numbers of servers of frozen models asked for by hand -> the slots that serve them, or why not.

The slots of the pool ``models`` serve what they serve; beyond them a model has slots of the
planner's, up to its ``max_slots``. Those that serve it stay, the last ones of it go first, and
further ones are taken from the policy's servers, the last of the recipe first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core.reconcile.manual_plan import OrderRefused
from libra_cli.core.types import Plan, Pool, Role, Slot, SlotId


def ordered_models(
    models: Sequence[FrozenModelSpec],
    slots: Sequence[Slot],
    today: Plan,
    to: Mapping[str, int],
    pins: Mapping[SlotId, Role],
) -> dict[SlotId, str]:
    """Return which of the ``slots`` serve which of the recipe's ``models``, with as many servers of
    each in all as ``to`` says; of one that it does not name as many as today.

    Raises:
        OrderRefused: there is no such model, or not so many servers of it are allowed or possible.
    """
    limits = {one.name: (one.slots, one.most_slots) for one in models}
    held = dict(today.models)
    for name, number in to.items():
        if name not in limits:
            known = ", ".join(limits) or "none"
            raise OrderRefused(f"there is no model {name!r}; the run serves {known}")
        least, most = limits[name]
        if not least <= number <= most:
            raise OrderRefused(
                f"{name}={number} is asked for: it has {least} to {most} servers "
                "(models[].slots and max_slots)"
            )
        _resize(held, slots, today, pins, name, number - least)
    return held


def _resize(
    held: dict[SlotId, str],
    slots: Sequence[Slot],
    today: Plan,
    pins: Mapping[SlotId, Role],
    name: str,
    number: int,
) -> None:
    """Have so many slots of the planner's serve the model."""
    own = [slot for slot, model in held.items() if model == name]
    for slot in own[number:]:
        del held[slot]
    serving = dict(today.servers)
    free = [
        slot.id
        for slot in reversed(slots)
        if slot.pool is Pool.HYBRID
        and slot.id in serving
        and not (slot.is_joined or slot.id in held or slot.id in pins)
    ]
    missing = number - len(own)
    if missing > len(free):
        raise OrderRefused(
            f"{name} would need {missing} slots more, and {len(free)} slots of the pool auto serve "
            "the policy and are not pinned"
        )
    held |= dict.fromkeys(free[: max(0, missing)], name)
