"""Who carries out what: every action the machine can take, and the part of the runtime it goes to.

The match is exhaustive, here and in each part, so an action that nobody performs is an error of
mypy and not of a run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, assert_never

from libra_cli.core import actions as a
from libra_cli.core.events import Event, TimerFired
from libra_cli.core.planning.planner import DecisionMaker, answer
from libra_cli.runtime.order_files import Orders
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.teacher import Teacher
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses
from libra_cli.runtime.weights.versions import Weights


class EpisodeSource(Protocol):
    """Where trajectories come from: environments that are played, or demonstrations."""

    async def perform(self, action: a.EpisodeAction) -> Event | None:
        """Carry out one action."""


@dataclass(frozen=True, slots=True)
class Performer:
    """Carries out the actions of one run."""

    servers: Servers
    trainer: TrainerProcesses
    workers: WorkerProcesses
    episodes: EpisodeSource
    orders: Orders
    weights: Weights
    planner: DecisionMaker
    """Looks for a better plan; called in a thread, since it may compute for seconds."""
    teacher: Teacher | None = None
    """Of a recipe that has one."""

    async def perform(self, action: a.RuntimeAction) -> Event | None:
        """Carry out one action; what comes of it is the machine's next event, if anything does."""
        match action:
            case (
                a.StartServer()
                | a.CheckServer()
                | a.StopServer()
                | a.SyncServer()
                | a.Generate()
                | a.AbortTurn()
            ):
                return await self.servers.perform(action)
            case a.StartTrainer() | a.StopTrainer() | a.Train() | a.Accumulate() | a.Checkpoint():
                return await self.trainer.perform(action)
            case a.StartWorker() | a.SyncWorker() | a.StopWorker():
                return await self.workers.perform(action)
            case a.StartEpisode() | a.AdvanceEpisode() | a.FinishEpisode() | a.ForgetEpisode():
                return await self.episodes.perform(action)
            case a.AskTeacher():
                assert self.teacher is not None, "the recipe has no teacher"
                return await self.teacher.perform(action)
            case a.Propose() | a.AnswerOrder() | a.Wake():
                return await self._steer(action)
            case _:
                assert_never(action)

    async def _steer(self, action: a.Propose | a.AnswerOrder | a.Wake) -> Event | None:
        match action:
            case a.Propose():
                return await asyncio.to_thread(answer, self.planner, action)
            case a.AnswerOrder():
                await self.orders.perform(action)
                return None
            case a.Wake():
                await asyncio.sleep(action.after_s)
                return TimerFired(action.name)
            case _:
                assert_never(action)

    async def close(self) -> None:
        """Drop every connection to a server, a gradient worker, the trainer or the teacher."""
        await self.servers.processes.close()
        await self.workers.processes.close()
        await self.trainer.close()
        if self.teacher is not None:
            await self.teacher.close()
