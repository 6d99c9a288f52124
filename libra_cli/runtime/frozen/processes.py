"""Carries out what the machine wants of the servers of frozen models on slots of the planner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from libra_cli.config.errors import LibraError
from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.config.recipe import NodeSpec
from libra_cli.core.actions import ModelAction, StartModel, StopModel
from libra_cli.core.events import Event, ModelFailed, ModelStarted, ModelStopped, ModelsUsed
from libra_cli.core.frozen.slots import FrozenSlot
from libra_cli.core.launch.process import model_of
from libra_cli.core.records import Record
from libra_cli.core.types import LostGpu, Slot, SlotId
from libra_cli.runtime.frozen.models import FrozenModels
from libra_cli.runtime.frozen.server import FrozenServer
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.lost_gpus import lost_gpus
from libra_cli.runtime.supervision.background import Background

ANSWERS_S = 60.0
"""How long a server that is to go may answer the requests that it has; then another one is asked.
Chosen: longer than a judge's answer, far shorter than what a move is given to stop."""
LOOK_S = 0.1
COUNT_EVERY_S = 1.0
"""A step of seconds is to have its own; an answer of ``vllm serve`` takes a good part of one."""


@dataclass(slots=True)
class _Running:
    incarnation: int
    server: FrozenServer
    life: asyncio.Task[None]


class ModelProcesses:
    """The servers of frozen models that come and go with the plan."""

    def __init__(
        self,
        specs: Sequence[FrozenModelSpec],
        nodes: Sequence[NodeSpec],
        cluster: Cluster,
        models: FrozenModels,
        slots: Mapping[SlotId, Slot],
        *,
        post: Callable[[Event], None],
    ) -> None:
        self._specs = {one.name: one for one in specs}
        self._nodes = {node.name: node for node in nodes}
        self._cluster = cluster
        self._models = models
        self._slots = slots
        self._post = post
        self._running: dict[SlotId, _Running] = {}
        self._background = Background()

    async def perform(self, action: ModelAction) -> Event | None:
        """Start a server and wait until it serves, or stop one."""
        if isinstance(action, StopModel):
            return await self._stop(action)
        running = self.begin(action)
        ends: set[asyncio.Future[None]] = {running.server.first, running.life}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.server.first.done():
            return ModelStarted(action.slot, action.incarnation)
        return None  # its life is over, and says so

    def begin(self, action: StartModel) -> _Running:
        """Start a server, or go on with the one that was started so."""
        slot = self._slots[action.slot]
        place = FrozenSlot(self._specs[action.model], self._nodes[slot.node], slot)
        server = self._models.add(place, _keep_nothing)
        life = self._background.start(
            f"serving {action.model} on {slot.id}", self._live(action, server)
        )
        running = self._running[slot.id] = _Running(action.incarnation, server, life)
        return running

    async def count(self) -> None:
        """Tell the machine for ever what is asked of frozen models, if the run has any."""
        while self._specs:
            self._post(ModelsUsed(self._models.uses))
            await asyncio.sleep(COUNT_EVERY_S)

    async def close(self) -> None:
        """Drop the connections; the processes go on."""
        await self._background.close()
        for one in self._running.values():
            self._models.remove(one.server)
        self._running.clear()

    async def _live(self, action: StartModel, server: FrozenServer) -> None:
        try:
            reason = await server.one_life(self._models.wake)
        except LibraError as error:
            reason = str(error)
        self._post(ModelFailed(action.slot, action.incarnation, reason))

    async def _stop(self, action: StopModel) -> ModelStopped:
        slot = self._slots[action.slot]
        lost: tuple[LostGpu, ...] = ()
        if (running := self._running.pop(slot.id, None)) is not None:
            if running.life.done():  # it had failed
                lost = await lost_gpus(self._cluster, [running.server.process])
            elif not action.at_once:
                await self._answered(running)
            running.life.cancel()
            await asyncio.wait({running.life})
            self._models.remove(running.server)
        await self._cluster.stop(slot.node, model_of(slot.id))
        return ModelStopped(action.slot, action.incarnation, lost)

    async def _answered(self, running: _Running) -> None:
        """Wait until a server has answered what it was asked, or has had long enough."""
        running.server.leaving = True
        self._models.wake()  # what waits for a seat there goes to another
        until = self._cluster.clock() + ANSWERS_S
        while running.server.running and not running.life.done():
            if self._cluster.clock() > until:
                return
            await asyncio.sleep(LOOK_S)


def _keep_nothing(_: Record) -> None:
    """The machine writes the rows of these slots."""
