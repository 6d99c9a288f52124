"""Slots whose processes were given up with their host, as their rows tell it."""

from __future__ import annotations

from libra_cli.core.records import SlotRecord
from libra_cli.core.types import SlotId


class SlotsGivenUp:
    """The slots of hosts that were given up, until something works there again.

    A process is given up where it is taken out, so that its incarnation grows, while its host does
    not answer. One that a host only did not answer for, for a while, works on.
    """

    def __init__(self) -> None:
        self._incarnations: dict[SlotId, int] = {}
        self._slots: set[SlotId] = set()

    def __bool__(self) -> bool:
        """Whether some are given up now."""
        return bool(self._slots)

    def slot(self, row: SlotRecord) -> bool:
        """Take in a slot's row; returns whether by it a slot has been given up, or works again."""
        before = self._incarnations.get(row.slot, row.incarnation)
        self._incarnations[row.slot] = row.incarnation
        if row.state == "unreachable" and row.incarnation > before:
            self._slots.add(row.slot)
            return True
        if row.slot not in self._slots or row.state not in ("serving", "training"):
            return False
        self._slots.remove(row.slot)
        return True
