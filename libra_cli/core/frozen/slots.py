"""Which slot serves which frozen model: those of the pool ``models``, dealt out in order.

The planner has none of these slots (``core.launch.placement``): they serve what they serve for the
whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_cli.config.frozen_models import POOL, FrozenModelSpec
from libra_cli.config.recipe import NodeSpec
from libra_cli.core.launch.process import model_of
from libra_cli.core.types import Pool, Slot


@dataclass(frozen=True, slots=True)
class FrozenSlot:
    """A slot, and the model that it serves."""

    model: FrozenModelSpec
    node: NodeSpec
    slot: Slot

    @property
    def process(self) -> str:
        """The name of the server's process on its host."""
        return model_of(self.slot.id)


def frozen_slots(
    models: Sequence[FrozenModelSpec], nodes: Sequence[NodeSpec]
) -> tuple[FrozenSlot, ...]:
    """Return the slots of all frozen models of a recipe, in the order of its nodes."""
    slots = [
        (node, Slot(f"{node.name}/{i}", node.name, _gpus(i, node.gpus_per_slot), Pool.ROLLOUT))
        for node in nodes
        for i, pool in enumerate(node.slot_pools)
        if pool == POOL
    ]
    served = [model for model in models for _ in range(model.slots)]
    return tuple(FrozenSlot(model, *place) for model, place in zip(served, slots, strict=True))


def _gpus(index: int, number: int) -> tuple[int, ...]:
    return tuple(range(index * number, (index + 1) * number))
