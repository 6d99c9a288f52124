"""Carries out what the machine wants of the trainer: its ranks on their hosts, and its steps.

Every method answers with an event; a rank that ends by itself is reported as TrainerFailed with the
end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, assert_never

from libra_cli.config.errors import LibraError
from libra_cli.core.actions import (
    Accumulate,
    Checkpoint,
    StartTrainer,
    StopTrainer,
    Train,
    TrainerAction,
)
from libra_cli.core.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    StepDone,
    TrainerFailed,
    TrainerStarted,
    TrainerStopped,
    VersionPublished,
)
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.launch.trainer_backend import TrainerLaunch, trainer_processes
from libra_cli.core.types import Slot, SlotId
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.cluster import Cluster, how_it_ended
from libra_cli.runtime.processes.tasks import ProcessTasks
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.failures import words_of
from libra_cli.runtime.trainer.checkpoints import checkpoint_name, directory_of, given_by
from libra_cli.runtime.trainer.connection import (
    NotSaved,
    TrainerConnection,
    connect_trainer_with,
)
from libra_cli.runtime.trainer.rank_watch import RankWatch

STARTUP_TIMEOUT_S = 1800.0
TRAINER = "trainer"
"""The name of the work on it: its ranks start and end together."""

Shares: TypeAlias = Sequence[Mapping[str, object]]
"""What the trainer must know to fetch the gradients of each worker's share of a step."""


@asynccontextmanager
async def no_shares(action: Train) -> AsyncIterator[Shares]:
    """Of a trainer that computes every step alone."""
    yield ()


class TrainerProcesses:
    """The trainer's processes, one launcher a node, and the first rank's HTTP endpoint."""

    def __init__(
        self,
        cluster: Cluster,
        slots: Mapping[SlotId, Slot],
        *,
        head: str,
        shares: Callable[[Train], AbstractAsyncContextManager[Shares]] = no_shares,
        post: Callable[[Event], None],
    ) -> None:
        """``head`` is the node of rank 0, which publishes weight versions; ``shares`` gives the
        gradient workers theirs of a step, for as long as it takes."""
        self._cluster = cluster
        self._slots = slots
        self.head = head
        self._shares = shares
        self._post = post
        self._connect = connect_trainer_with(cluster.recipe.training.backend)
        self._patience_s = cluster.recipe.run.lease_s
        self._trainer: TrainerConnection | None = None
        self._incarnation = 0
        self._running: dict[str, str] = {}
        self._tasks = ProcessTasks()
        self._background = Background()
        self._watching: asyncio.Task[None] | None = None

    async def perform(self, action: TrainerAction) -> Event | None:
        """Carry out whatever the machine wants of the trainer."""
        match action:
            case StartTrainer():
                return await self.start(action)
            case StopTrainer():
                return await self.stop(action)
            case Train():
                return await self.train(action)
            case Accumulate():
                return await self.accumulate(action)
            case Checkpoint():
                return await self.checkpoint(action)
            case _:
                assert_never(action)

    async def start(self, action: StartTrainer) -> Event | None:
        """Start every rank and wait until the world is whole."""
        self._incarnation = action.incarnation
        return await self._while_alive(action.incarnation, self._start(action))

    async def _start(self, action: StartTrainer) -> Event:
        if not action.resume:
            return await self._start_with((), action)
        cluster, name = self._cluster, checkpoint_name(action.resume)
        addresses = {node: fact.peer_address for node, fact in cluster.facts.items()}
        async with given_by(cluster.reached, addresses, name, cluster.secrets) as urls:
            return await self._start_with(urls, action)

    async def _start_with(self, urls: tuple[str, ...], action: StartTrainer) -> Event:
        """Start, with what hosts lack of the checkpoint for as long as it takes at ``urls``."""
        specs = await self._processes(urls, action)
        for spec in specs:
            self._running[spec.node] = spec.process
            await self._cluster.start(spec)
        self._watch(specs, action.incarnation)
        trainer = await self._connected(specs[0], action.incarnation)
        published = await trainer.wait_ready(timeout_s=STARTUP_TIMEOUT_S)
        return TrainerStarted(action.incarnation, published)

    async def _processes(
        self, urls: tuple[str, ...], action: StartTrainer
    ) -> tuple[ProcessSpec, ...]:
        cluster = self._cluster
        train = tuple(self._slots[slot] for slot in action.train)
        nodes = dict.fromkeys(slot.node for slot in train)
        name = checkpoint_name(action.resume)
        launch = TrainerLaunch(
            train=train,
            facts=cluster.facts,
            run_id=cluster.run_id,
            rendezvous_port=cluster.ports[self.head]["rendezvous"],
            model_dirs=cluster.model_dirs,
            trainer_incarnation=action.incarnation,
            resume={node: directory_of(cluster.hosts[node], name) for node in nodes}
            if name
            else None,
            shape=await cluster.architecture(self.head) if len(nodes) > 1 else None,
            checkpoint_urls=urls,
        )
        return trainer_processes(cluster.recipe, launch)

    async def _connected(self, first: ProcessSpec, incarnation: int) -> TrainerConnection:
        endpoint = await self._cluster.dial(first)
        await self._disconnect()
        self._trainer = self._connect(incarnation, endpoint, self._cluster.token)
        return self._trainer

    async def adopt(
        self, action: StartTrainer, *, version: int | None = None, checkpoint: int | None = None
    ) -> None:
        """Connect to the trainer that was started so; wait for what it still writes, by its step.

        Raises:
            HostError: its host cannot be reached.
        """
        self._incarnation = action.incarnation
        specs = await self._processes((), action)
        self._running = {spec.node: spec.process for spec in specs}
        self._watch(specs, action.incarnation)
        await self._connected(specs[0], action.incarnation)
        if version is not None:
            self._report(action.incarnation, self._published(action.incarnation, version))
        if checkpoint is not None:
            self._report(action.incarnation, self._written(action.incarnation, checkpoint))

    def _watch(self, specs: Sequence[ProcessSpec], incarnation: int) -> None:
        """Find a rank that stops or does not go on, from now until the trainer is stopped."""
        self._watch_no_more()
        self._watching = self._background.keep(
            "watching the trainer's ranks", lambda: self._until_stalled(specs, incarnation)
        )

    async def _until_stalled(self, specs: Sequence[ProcessSpec], incarnation: int) -> None:
        reason = await RankWatch(self._cluster, specs, incarnation).until_stalled()
        self._tasks.end(TRAINER)
        self._post(TrainerFailed(incarnation, reason))

    def _watch_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _while_alive(
        self, incarnation: int, work: Coroutine[Any, Any, Event]
    ) -> Event | None:
        return await self._tasks.during(TRAINER, work, partial(TrainerFailed, incarnation))

    async def stop(self, action: StopTrainer) -> Event:
        """Ask the ranks to leave, then make sure."""
        self._watch_no_more()
        self._tasks.end(TRAINER)
        if self._trainer is not None:
            with contextlib.suppress(LibraError):  # it may be gone already; the agents find out
                await self._trainer.stop()
        await self._disconnect()
        stops = [self._cluster.stop(node, name) for node, name in self._running.items()]
        await asyncio.gather(*stops)
        self._running.clear()
        return TrainerStopped(action.incarnation)

    def exited(self, event: Exited) -> None:
        """A launcher ended; if nobody asked for that, the trainer has failed."""
        if self._running.get(event.node) != event.process or event.requested:
            return
        self._tasks.end(TRAINER)
        reason = f"{event.process} on {event.node} {how_it_ended(event)}"
        self._post(TrainerFailed(self._incarnation, reason))

    def returned(self, node: str, alive: frozenset[str]) -> None:
        """A lost node answers again, or is given up; a rank that died there was never reported."""
        process = self._running.get(node)
        if process is not None and process not in alive:
            self._tasks.end(TRAINER)
            self._post(
                TrainerFailed(self._incarnation, f"{process} on {node} died while unreachable")
            )

    async def accumulate(self, action: Accumulate) -> Event | None:
        """The gradients of a part of a step's batch."""
        if self._trainer is None:
            return TrainerFailed(action.incarnation, "the trainer is not connected")
        work = self._trainer.accumulate(action, patience_s=self._patience_s)
        return await self._while_alive(action.incarnation, work)

    async def train(self, action: Train) -> Event | None:
        """One optimizer step, with the gradients of the workers' shares.

        Its version, and its checkpoint if it has one, are events of their own, later.
        """
        if self._trainer is None:
            return TrainerFailed(action.incarnation, "the trainer is not connected")
        async with self._shares(action) as shares:
            work = self._trainer.train(action, shares, patience_s=self._patience_s)
            done = await self._while_alive(action.incarnation, work)
        if isinstance(done, StepDone):
            if done.published is None:
                self._report(action.incarnation, self._published(action.incarnation, action.step))
            if action.ledger is not None:
                self._report(action.incarnation, self._written(action.incarnation, action.step))
        return done

    def _report(self, incarnation: int, news: Coroutine[Any, Any, Event]) -> None:
        """Post an event when it comes."""
        self._background.start(
            "waiting for what the trainer writes",
            self._post_when_there(incarnation, news),
            failed=lambda error: self._post(TrainerFailed(incarnation, words_of(error))),
        )

    async def _post_when_there(self, incarnation: int, news: Coroutine[Any, Any, Event]) -> None:
        event = await self._while_alive(incarnation, news)
        if event is not None:
            self._post(event)

    async def _published(self, incarnation: int, step: int) -> Event:
        if self._trainer is None:
            return TrainerFailed(incarnation, "the trainer is not connected")
        published = await self._trainer.wait_published(step, patience_s=self._patience_s)
        return VersionPublished(incarnation, published)

    async def _written(self, incarnation: int, step: int) -> Event:
        if self._trainer is None:
            return TrainerFailed(incarnation, "the trainer is not connected")
        waiting = self._trainer.wait_checkpoint(step, patience_s=self._patience_s)
        return await saved_or_not(incarnation, step, waiting)

    async def checkpoint(self, action: Checkpoint) -> Event | None:
        """Write a checkpoint between two steps."""
        return await self._while_alive(action.incarnation, self._checkpoint(action))

    async def _checkpoint(self, action: Checkpoint) -> Event:
        if self._trainer is None:
            return TrainerFailed(action.incarnation, "the trainer is not connected")
        waiting = self._trainer.checkpoint(action.ledger)
        return await saved_or_not(action.incarnation, action.step, waiting)

    async def _disconnect(self) -> None:
        if self._trainer is not None:
            await self._trainer.close()
            self._trainer = None

    async def close(self) -> None:
        """Drop the connection."""
        await self._background.close()
        await self._disconnect()


async def saved_or_not(incarnation: int, step: int, path: Awaitable[str]) -> Event:
    """What came of a checkpoint: one that cannot be written is no death of the trainer."""
    try:
        return CheckpointSaved(incarnation, step, await path)
    except NotSaved as error:
        return CheckpointFailed(incarnation, step, str(error))
