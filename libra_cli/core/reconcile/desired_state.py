"""What is wanted of every slot: the newest plan, less what has turned out not to work since.

Slots of a node may be joined into one and split again, so of all slots that there ever were only
some **exist**: those into which the nodes are divided now.

Guarantee: a slot is wanted for one thing at most, the trainer's slots for nothing else, and of
slots that overlap one at most is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from libra_cli.core.types import Bucket, Plan, Role, Slot, SlotId, devices_of

Served: TypeAlias = Bucket | str
"""What a server of a slot is: one of the policy, of a shape, or one of a frozen model, by name."""


class DesiredState:
    """The servers with their shapes, those of frozen models, the gradient workers, and the
    trainer's slots in rank order.
    """

    def __init__(self, plan: Plan, slots: Iterable[Slot]) -> None:
        #: Every slot that there ever was.
        self.slots: dict[SlotId, Slot] = {}
        self._existing: list[SlotId] = []
        self.divide(slots)
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Want what this plan has, and forget that the trainer refused slots of an earlier one."""
        self.servers: dict[SlotId, Bucket] = dict(plan.servers)
        self.models: dict[SlotId, str] = dict(plan.models)
        self.gradient: set[SlotId] = set(plan.gradient)
        self.trainer: tuple[SlotId, ...] = plan.train
        #: Why the trainer is not to move to the slots that the plan has for it.
        self.refusal = ""

    def divide(self, slots: Iterable[Slot]) -> None:
        """Take these slots as the ones that exist."""
        now = {slot.id: slot for slot in slots}
        self.slots |= now
        self._existing = list(now)

    @property
    def existing(self) -> tuple[Slot, ...]:
        """The slots that exist, in the order in which they were given."""
        return tuple(self.slots[slot] for slot in self._existing)

    def plan(self, reasons: tuple[str, ...]) -> Plan:
        """The placement that is wanted now, as a plan."""
        gradient = tuple(slot for slot in self.slots if slot in self.gradient)
        servers, models = tuple(self.servers.items()), tuple(self.models.items())
        return Plan(servers, self.trainer, reasons, gradient, models)

    def role_of(self, slot: SlotId) -> Role:
        """Return the role that is wanted of the slot."""
        if slot in self.servers:
            return Role.ROLLOUT
        if slot in self.gradient:
            return Role.GRADIENT
        if slot in self.models:
            return Role.MODEL
        return Role.TRAIN if slot in self.trainer else Role.IDLE

    def served(self, slot: SlotId) -> Served | None:
        """Return what a server of the slot is to be; None where it is to have none."""
        return self.servers.get(slot) or self.models.get(slot)

    def trains_on(self, slot: Slot) -> bool:
        """Whether the trainer is to be on the slot, or on something of it."""
        return any(slot.overlaps(self.slots[held]) for held in self.trainer)

    def keep_trainer(self, slots: tuple[SlotId, ...], why: str) -> None:
        """Want the trainer on these slots after all, and nothing else there."""
        self.trainer, self.refusal = slots, why
        for slot in slots:
            self._make_room(slot)

    def give_back(self, slot: SlotId, role: Role, served: Served | None) -> None:
        """Want of the slot again what it did before, unless the trainer has it."""
        self._want_nothing(slot)
        if self.trains_on(self.slots[slot]):
            return
        if role in (Role.ROLLOUT, Role.GRADIENT, Role.MODEL):
            self._make_room(slot)
        if isinstance(served, Bucket):
            self.servers[slot] = served
        elif served:
            self.models[slot] = served
        elif role is Role.GRADIENT:
            self.gradient.add(slot)

    def _want_nothing(self, slot: SlotId) -> None:
        self.servers.pop(slot, None)
        self.models.pop(slot, None)
        self.gradient.discard(slot)

    def _make_room(self, slot_id: SlotId) -> None:
        """Want nothing of the slot, which exists from now on, nor of those that overlap it."""
        slot = self.slots[slot_id]
        hit = [other for other in self.slots.values() if other.overlaps(slot)]
        for other in hit:
            self._want_nothing(other.id)
        if slot_id in self._existing:
            return
        ended = [other for other in hit if other.id in self._existing]
        free = {device for other in ended for device in devices_of(other)} - devices_of(slot)
        begun = [slot_id]
        for other in sorted(self.slots.values(), key=lambda slot: len(devices_of(slot))):
            if devices_of(other) <= free:
                free -= devices_of(other)
                begun.append(other.id)
        place = min((self._existing.index(other.id) for other in ended), default=0)
        gone = {other.id for other in ended}
        rest = [slot for slot in self._existing[place:] if slot not in gone]
        self._existing[place:] = [*sorted(begun, key=list(self.slots).index), *rest]

    def check(self) -> None:
        """Raise AssertionError if a slot or a device is wanted
        twice, or a wanted slot does not exist.
        """
        wanted = [*self.servers, *self.models, *self.gradient, *self.trainer]
        assert len(wanted) == len(set(wanted)), "a slot is wanted twice"
        devices = [device for slot in wanted for device in devices_of(self.slots[slot])]
        assert len(devices) == len(set(devices)), f"two of {wanted} are wanted on one device"
        assert set(self._existing) >= set(wanted), f"some of {wanted} do not exist"
