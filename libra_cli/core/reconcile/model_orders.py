"""Numbers of servers of frozen models asked for by hand -> the slots that serve them, or why not.

The slots of the pool ``models`` serve what they serve; beyond them a model has slots of the
planner's, up to its ``max_slots`` (``core.frozen.placement`` says which).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core.frozen.placement import with_servers
from libra_cli.core.reconcile.manual_plan import OrderRefused
from libra_cli.core.types import Plan, Role, Slot, SlotId


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
        resized = with_servers(today, slots, pins, name, number - least)
        if resized is None:
            raise OrderRefused(
                f"{name}={number} needs slots of the pool auto that serve the policy, or gives "
                "some back, and too few are not pinned"
            )
        today = replace(today, models=tuple(resized.items()))
    return dict(today.models)
