"""The servers of frozen models on the planner's slots, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import Seconds
from libra_cli.sim.virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class SimModels:
    """Starts and stops servers of frozen models; ``start_s`` is how long one takes to serve."""

    time: VirtualTime
    start_s: Seconds

    def perform(self, action: a.ModelAction) -> None:
        """Start or stop a server; its event follows in virtual time."""
        match action:
            case a.StartModel(slot, incarnation):
                self.time.later(e.ModelStarted(slot, incarnation), self.start_s)
            case a.StopModel(slot, incarnation):
                self.time.later(e.ModelStopped(slot, incarnation), 0.0)
            case _:
                assert_never(action)
