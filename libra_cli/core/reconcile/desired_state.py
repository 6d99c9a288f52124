"""What is wanted of every slot: the newest plan, less what has turned out not to work since.

Guarantee: a slot is wanted for one thing at most, and the core's slots for nothing but the core.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra_cli.core.types import Bucket, Plan, Role, Slot, SlotId


class DesiredState:
    """Servers with their shapes, gradient workers, and the core's slots in rank order."""

    def __init__(self, plan: Plan) -> None:
        self.slots: dict[SlotId, Slot] = {}
        #: Whether it has come to differ from the plan since somebody last asked.
        self.differs = False
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Another plan."""
        self.servers: dict[SlotId, Bucket] = dict(plan.servers)
        self.gradient: set[SlotId] = set(plan.gradient)
        self.core: tuple[SlotId, ...] = plan.train
        #: Why the core is not to move to the slots that the plan has for it.
        self.refusal = ""

    def learn(self, slots: Iterable[Slot]) -> None:
        """These slots exist."""
        self.slots |= {slot.id: slot for slot in slots}

    def plan(self, reasons: tuple[str, ...]) -> Plan:
        """What is wanted now."""
        gradient = tuple(slot for slot in self.slots if slot in self.gradient)
        return Plan(tuple(self.servers.items()), self.core, reasons, gradient)

    def role_of(self, slot: SlotId) -> Role:
        """What the slot is to do."""
        if slot in self.servers:
            return Role.ROLLOUT
        if slot in self.gradient:
            return Role.GRADIENT
        return Role.TRAIN if slot in self.core else Role.IDLE

    def refuse_core(self, core: tuple[SlotId, ...], why: str) -> None:
        """The core is to be these slots after all, and nothing else is to be there."""
        self.core, self.refusal, self.differs = core, why, True
        for slot in core:
            self.servers.pop(slot, None)
            self.gradient.discard(slot)

    def give_back(self, slot: SlotId, role: Role, bucket: Bucket | None) -> None:
        """The slot is to do again what it did before, if the core does not have it."""
        self.differs = True
        self.servers.pop(slot, None)
        self.gradient.discard(slot)
        if slot in self.core:
            return
        if role is Role.ROLLOUT and bucket is not None:
            self.servers[slot] = bucket
        elif role is Role.GRADIENT:
            self.gradient.add(slot)

    def check(self) -> None:
        """Invariants that hold between any two events."""
        assert not self.servers.keys() & self.gradient, "a slot is wanted twice"
        assert not set(self.core) & (self.servers.keys() | self.gradient), "the core serves"
