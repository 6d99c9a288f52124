"""Which slots of the planner's serve a frozen model, if it has so many.

Those that serve it stay, the last ones of it go first, and further ones are taken from the policy's
servers, the last of the recipe first: never one that is joined, pinned, or bound to a side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core.types import Plan, Pool, Slot, SlotId

Served = Mapping[SlotId, str]
"""The frozen model that each of some slots serves."""


def with_servers(
    plan: Plan, slots: Sequence[Slot], pinned: Collection[SlotId], name: str, number: int
) -> dict[SlotId, str] | None:
    """Return the plan's slots of frozen models, with ``number`` that serve the model ``name``; None
    if there are not so many to take, or to give back."""
    held = dict(plan.models)
    own = [slot for slot, model in held.items() if model == name]
    if not set(own[number:]).isdisjoint(pinned):
        return None
    for slot in own[number:]:
        del held[slot]
    serving = dict(plan.servers)
    free = [
        slot.id
        for slot in reversed(slots)
        if slot.pool is Pool.HYBRID
        and slot.id in serving
        and not (slot.is_joined or slot.id in held or slot.id in pinned)
    ]
    missing = max(0, number - len(own))
    if missing > len(free):
        return None
    return held | dict.fromkeys(free[:missing], name)


def neighbours(
    models: Sequence[FrozenModelSpec],
    plan: Plan,
    slots: Sequence[Slot],
    pinned: Collection[SlotId],
) -> Iterator[dict[SlotId, str]]:
    """Yield today's slots of frozen models, and those with one server more or fewer of each, with
    twice, four times as many and so on, and with the most that the recipe allows."""
    yield dict(plan.models)
    extra = Counter(dict(plan.models).values())
    for spec in models:
        for number in _tried(extra[spec.name], spec.slots, spec.most_slots):
            found = with_servers(plan, slots, pinned, spec.name, number)
            if found is not None:
                yield found


def _tried(extra: int, own: int, most: int) -> list[int]:
    """Numbers of servers beyond a model's own: one more or fewer, doublings, and the most."""
    doubled = {((own + extra) << times) - own for times in range(1, most.bit_length() + 1)}
    tried = {extra - 1, extra + 1, *doubled, most - own} - {extra}
    return sorted(number for number in tried if 0 <= number <= most - own)


def counted(models: Sequence[FrozenModelSpec], served: Served) -> tuple[tuple[str, int], ...]:
    """Return how many servers each frozen model has, with those of its own slots."""
    extra = Counter(served.values())
    return tuple((spec.name, spec.slots + extra[spec.name]) for spec in models)
