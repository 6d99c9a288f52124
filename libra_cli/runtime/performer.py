"""Who carries out what: every action the machine can take, and the part of the runtime it goes to.

Each owner has one method, ``perform``, and the actions of one union; who owns an action is looked
up by its class. A performer that has an action with no owner, or with two, cannot be made.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from libra_cli.core import actions as a
from libra_cli.core.events import Event, PlanChosen, PlanKept, TimerFired
from libra_cli.core.parts import takers_of_one
from libra_cli.core.planning.planner import DecisionMaker, answer
from libra_cli.runtime.frozen.processes import ModelProcesses
from libra_cli.runtime.order_files import Orders
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.teacher import Teacher
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses
from libra_cli.runtime.weights.versions import Weights


class Owner(Protocol):
    """Whoever carries out the actions of one union."""

    async def perform(self, action: Any) -> Event | None:
        """Carry out one action; what comes of it is the machine's next event, if anything does."""


class EpisodeSource(Protocol):
    """Carries out the actions about episodes: plays environments, or reads demonstrations."""

    async def perform(self, action: a.EpisodeAction) -> Event | None:
        """Carry out one action; what comes of it is the machine's next event, if anything does."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Asks the planner for a better plan, in a thread, since it may compute for seconds."""

    planner: DecisionMaker

    async def perform(self, action: a.Propose) -> PlanChosen | PlanKept:
        return await asyncio.to_thread(answer, self.planner, action)


class Alarms:
    """Carries out the machine's timers, by the clock of the event loop."""

    async def perform(self, action: a.Wake) -> TimerFired:
        await asyncio.sleep(action.after_s)
        return TimerFired(action.name)


@dataclass(slots=True)
class Performer:
    """Gives each action of a run to the part of the runtime that carries it out."""

    servers: Servers
    trainer: TrainerProcesses
    workers: WorkerProcesses
    models: ModelProcesses
    episodes: EpisodeSource
    orders: Orders
    weights: Weights
    planner: DecisionMaker
    teacher: Teacher | None = None
    """The connection to the teacher's server; None if the recipe has no teacher."""
    _owners: dict[type, Owner] = field(init=False)

    def __post_init__(self) -> None:
        owners: list[tuple[Any, Any]] = [
            (a.ServerAction | a.TurnAction, self.servers),
            (a.TrainerAction, self.trainer),
            (a.WorkerAction, self.workers),
            (a.ModelAction, self.models),
            (a.EpisodeAction, self.episodes),
            (a.AskTeacher, self.teacher),
            (a.Propose, Proposals(self.planner)),
            (a.AnswerOrder, self.orders),
            (a.Wake, Alarms()),
        ]
        self._owners = takers_of_one(owners, a.RuntimeAction)

    async def perform(self, action: a.RuntimeAction) -> Event | None:
        """Carry out one action; what comes of it is the machine's next event, if anything does."""
        return await self._owners[type(action)].perform(action)

    async def close(self) -> None:
        """Drop every connection to a server, a gradient worker, a model, the trainer or the
        teacher."""
        async with AsyncExitStack() as closing:  # each, whatever comes of the others
            if self.teacher is not None:
                closing.push_async_callback(self.teacher.close)
            closing.push_async_callback(self.trainer.close)
            closing.push_async_callback(self.models.close)
            closing.push_async_callback(self.workers.processes.close)
            closing.push_async_callback(self.servers.processes.close)
