"""The servers of frozen models on slots of the planner: they come, serve and go as it says.

They load no version, so they are in use as soon as they are healthy. Whoever needs a model waits
while none of its servers is, and asks another one where one goes, so nothing here is requeued.
"""

from __future__ import annotations

from typing import Any, ClassVar, assert_never

from libra_cli.core.actions import Action, StartModel, StopModel
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import ReplicaSet
from libra_cli.core.events import (
    ModelEvent,
    ModelFailed,
    ModelStarted,
    ModelStopped,
    ModelsUsed,
    NodeEvent,
    PublishedVersion,
)
from libra_cli.core.launch.process import model_of
from libra_cli.core.model_use import ModelUses
from libra_cli.core.notices import ReplicaChanged, Result
from libra_cli.core.types import Role, Seconds, SlotId


class ModelServers(ReplicaSet):
    """The servers of frozen models that the plan gives a slot."""

    events: ClassVar[Any] = ModelEvent | NodeEvent
    actions: ClassVar[Any] = StartModel | StopModel
    role = Role.MODEL
    working = ReplicaState.SERVING

    def __init__(self, uses: ModelUses) -> None:
        """``uses`` counts what is asked of frozen models, on any slot."""
        super().__init__()
        self._uses = uses
        self._run_ends = False

    def serve(self, replica: Replica, model: str, *, now: Seconds) -> list[Result]:
        """Start a server of the model of this name."""
        replica.model = model
        return self.start(replica, now=now)

    def stop(self, why: str, *, now: Seconds) -> list[Result]:
        """Stop every server, since the run ends and nobody waits for answers."""
        self._run_ends = True
        return super().stop(why, now=now)

    def _take_in(self, event: ModelEvent, now: Seconds) -> list[Result]:
        match event:
            case ModelStarted():
                return self._serves(event, now)
            case ModelFailed():
                return self.failed(event, now=now)
            case ModelStopped():
                return self.gone(event)
            case ModelsUsed():
                self._uses.saw(event.uses)
                return []
            case _:
                assert_never(event)

    def _serves(self, event: ModelStarted, now: Seconds) -> list[Result]:
        replica = self.current(event.slot, event.incarnation)
        if replica is None or replica.state is not ReplicaState.STARTING:
            return []
        replica.move(ReplicaState.SERVING, now=now)
        replica.has_worked = True
        return [ReplicaChanged(replica)]

    def _start_action(self, replica: Replica) -> Action:
        return StartModel(replica.slot.id, replica.incarnation, replica.model)

    def _sync_action(self, replica: Replica, published: PublishedVersion) -> Action:
        raise AssertionError(f"{replica.slot.id} serves {replica.model}, which has no versions")

    def _sync(self, replica: Replica) -> list[Result]:
        return []

    def _stop_action(self, replica: Replica) -> Action:
        return StopModel(replica.slot.id, replica.incarnation, at_once=self._run_ends)

    def _process_of(self, slot: SlotId) -> str:
        return model_of(slot)

    def _taken_out(self, slot: SlotId, *, died: bool) -> list[Result]:
        return []
