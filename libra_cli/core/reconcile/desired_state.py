"""What is wanted of every slot: the newest plan, less what has turned out not to work since.

Guarantee: a slot is wanted for one thing at most, and the trainer's slots for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra_cli.core.types import Bucket, Plan, Role, Slot, SlotId


class DesiredState:
    """Servers with their shapes, gradient workers, and the trainer's slots in rank order."""

    def __init__(self, plan: Plan) -> None:
        self.slots: dict[SlotId, Slot] = {}
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Another plan."""
        self.servers: dict[SlotId, Bucket] = dict(plan.servers)
        self.gradient: set[SlotId] = set(plan.gradient)
        self.trainer: tuple[SlotId, ...] = plan.train
        #: Why the trainer is not to move to the slots that the plan has for it.
        self.refusal = ""

    def learn(self, slots: Iterable[Slot]) -> None:
        """These slots exist."""
        self.slots |= {slot.id: slot for slot in slots}

    def plan(self, reasons: tuple[str, ...]) -> Plan:
        """What is wanted now."""
        gradient = tuple(slot for slot in self.slots if slot in self.gradient)
        return Plan(tuple(self.servers.items()), self.trainer, reasons, gradient)

    def role_of(self, slot: SlotId) -> Role:
        """What the slot is to do."""
        if slot in self.servers:
            return Role.ROLLOUT
        if slot in self.gradient:
            return Role.GRADIENT
        return Role.TRAIN if slot in self.trainer else Role.IDLE

    def keep_trainer(self, slots: tuple[SlotId, ...], why: str) -> None:
        """The trainer is to be on these slots after all, and nothing else is to be there."""
        self.trainer, self.refusal = slots, why
        for slot in slots:
            self.servers.pop(slot, None)
            self.gradient.discard(slot)

    def give_back(self, slot: SlotId, role: Role, bucket: Bucket | None) -> None:
        """The slot is to do again what it did before, if the trainer does not have it."""
        self.servers.pop(slot, None)
        self.gradient.discard(slot)
        if slot in self.trainer:
            return
        if role is Role.ROLLOUT and bucket is not None:
            self.servers[slot] = bucket
        elif role is Role.GRADIENT:
            self.gradient.add(slot)

    def check(self) -> None:
        """Invariants that hold between any two events."""
        assert not self.servers.keys() & self.gradient, "a slot is wanted twice"
        assert not set(self.trainer) & (self.servers.keys() | self.gradient), "the trainer serves"
