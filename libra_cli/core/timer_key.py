"""What the machine's timers are for: who has set one, and about what.

A key is a string in ``Wake`` and in ``TimerFired``, as events are stored: its owner and what it is
about, separated by blanks, which neither a slot nor a node has in its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TimerOwner(StrEnum):
    """The part that sets a timer, and acts when it fires."""

    COURSE = "end"
    TRAINER = "trainer"
    TEACHING = "teaching"
    EVALUATING = "evaluating"
    NODE = "gone"
    REPLICA = "again"
    DRAIN = "drain"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class TimerKey:
    """An owner, and which of its timers is meant."""

    owner: TimerOwner
    about: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The key as a string, from which ``named`` makes it again."""
        return " ".join((self.owner, *self.about))

    @classmethod
    def named(cls, name: str) -> TimerKey:
        """Return the key of this name.

        Raises:
            ValueError: no owner sets such timers.
        """
        owner, *about = name.split(" ")
        return cls(TimerOwner(owner), tuple(about))
