"""Carries out what the machine wants of the trainer: its ranks on their hosts, and its steps.

Every method answers with an event; a rank that ends by itself is reported as TrainerFailed with the
end of its log.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, assert_never

from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import (
    Accumulate,
    Checkpoint,
    StartTrainer,
    StopTrainer,
    Train,
    TrainerAction,
    TrainSample,
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
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.processes.owner import STARTUP_TIMEOUT_S, ProcessOwner
from libra_cli.runtime.store.images import ImageStore
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.failures import words_of
from libra_cli.runtime.trainer.checkpoints import checkpoint_name, directory_of, given_by
from libra_cli.runtime.trainer.connection import (
    NO_IMAGES,
    ImagesOf,
    NotSaved,
    TrainerConnection,
    connect_trainer_with,
)
from libra_cli.runtime.trainer.rank_watch import stalled_rank

TRAINER = "trainer"
"""The name of the work on it: its ranks start and end together."""

Shares: TypeAlias = Sequence[Mapping[str, object]]
"""What the trainer must know to fetch the gradients of each worker's share of a step."""


@asynccontextmanager
async def no_shares(action: Train) -> AsyncIterator[Shares]:
    """The shares of a trainer that computes every step alone: none."""
    yield ()


class TrainerProcesses:
    """The trainer's processes, one launcher a node, and the first rank's control stream."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        slots: Mapping[SlotId, Slot],
        *,
        head: str,
        shares: Callable[[Train], AbstractAsyncContextManager[Shares]] = no_shares,
        images: ImageStore | None = None,
        post: Callable[[Event], None],
    ) -> None:
        """``head`` is the node of rank 0, which publishes weight versions; ``shares`` gives the
        gradient workers theirs of a step, for as long as it takes; ``images`` has what
        trajectories were shown."""
        self._recipe = recipe
        self._cluster = cluster
        self._slots = slots
        self.head = head
        self._shares = shares
        self._images = images
        self._post = post
        self._patience_s = recipe.run.lease_s
        connect = connect_trainer_with(recipe.training.backend)
        self.processes: ProcessOwner[TrainerConnection] = ProcessOwner(
            cluster,
            connect=lambda name, *reached: connect(*reached),
            failed=lambda name, incarnation, reason: TrainerFailed(incarnation, reason),
            stalled=partial(stalled_rank, cluster),
            post=post,
        )
        self._background = Background()
        #: Held by whoever waits for a version: they are told in the order in which they are asked.
        self._versions = asyncio.Lock()

    @property
    def _trainer(self) -> TrainerConnection:
        """The connection to rank 0; raises NotConnected."""
        return self.processes.connection(TRAINER)

    async def perform(self, action: TrainerAction) -> Event | None:
        """Carry out whatever the machine wants of the trainer; None if it ends meanwhile.

        A step's version, and its checkpoint if it has one, are events of their own, later.
        """
        if isinstance(action, StopTrainer):
            lost = await self.processes.stop(TRAINER, leave=lambda trainer: trainer.stop())
            return TrainerStopped(action.incarnation, lost)
        done = await self._while_alive(action.incarnation, self._perform(action))
        if isinstance(action, Train) and isinstance(done, StepDone):
            self._await_what_is_written(action, done)
        return done

    async def _perform(self, action: StartTrainer | Train | Accumulate | Checkpoint) -> Event:
        match action:
            case StartTrainer():
                return await self._start(action)
            case Train():
                return await self._train(action)
            case Accumulate():
                images = self._images_of(action.samples)
                return await self._trainer.accumulate(
                    action, patience_s=self._patience_s, images=images
                )
            case Checkpoint():
                waiting = self._trainer.checkpoint(action.ledger, patience_s=self._patience_s)
                return await saved_or_not(action.incarnation, action.step, waiting)
            case _:
                assert_never(action)

    async def _while_alive(
        self, incarnation: int, work: Coroutine[Any, Any, Event]
    ) -> Event | None:
        return await self.processes.during(TRAINER, incarnation, work)

    # -- coming ---------------------------------------------------------------------------------

    async def _start(self, action: StartTrainer) -> Event:
        if not action.resume:
            return await self._start_with((), action)
        cluster, name = self._cluster, checkpoint_name(action.resume)
        addresses = {node: fact.peer_address for node, fact in cluster.facts.items()}
        async with given_by(cluster.reached, addresses, name, cluster.secrets) as urls:
            return await self._start_with(urls, action)

    async def _start_with(self, urls: tuple[str, ...], action: StartTrainer) -> Event:
        """Start, with what hosts lack of the checkpoint for as long as it takes at ``urls``."""
        specs = await self._launchers(urls, action)
        trainer = await self.processes.start(TRAINER, action.incarnation, specs)
        published = await trainer.wait_ready(timeout_s=STARTUP_TIMEOUT_S)
        return TrainerStarted(action.incarnation, published)

    async def _launchers(
        self, urls: tuple[str, ...], action: StartTrainer
    ) -> tuple[ProcessSpec, ...]:
        cluster = self._cluster
        train = tuple(self._slots[slot] for slot in action.train)
        nodes = dict.fromkeys(slot.node for slot in train)
        name = checkpoint_name(action.resume)
        asks = len(nodes) > 1 or any(cluster.facts[node].gpu_gib for node in nodes)
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
            shape=await cluster.models.architecture(self.head) if asks else None,
            checkpoint_urls=urls,
        )
        return trainer_processes(self._recipe, launch)

    async def adopt(
        self, action: StartTrainer, *, versions: Iterable[int], checkpoint: int | None
    ) -> None:
        """Connect to a trainer that runs, and wait for the versions and the checkpoint that it
        still writes, or whose news nobody has taken.

        Raises:
            HostError: its host cannot be reached.
        """
        specs = await self._launchers((), action)
        await self.processes.adopt(TRAINER, action.incarnation, specs)
        for version in versions:
            self._report(action.incarnation, self._published(action.incarnation, version))
        if checkpoint is not None:
            self._report(action.incarnation, self._written(action.incarnation, checkpoint))

    # -- steps ----------------------------------------------------------------------------------

    async def _train(self, action: Train) -> Event:
        trainer, images = self._trainer, self._images_of(action.samples)
        async with self._shares(action) as shares:
            return await trainer.train(action, shares, patience_s=self._patience_s, images=images)

    def _images_of(self, samples: Sequence[TrainSample]) -> ImagesOf:
        """The images of the samples' trajectories; raises StateError."""
        if self._images is None:
            return NO_IMAGES
        found = {one.trajectory.id: self._images.of(one.trajectory.id) for one in samples}
        return {trajectory: images for trajectory, images in found.items() if images}

    def _await_what_is_written(self, action: Train, done: StepDone) -> None:
        if done.published is None:
            self._report(action.incarnation, self._published(action.incarnation, action.step))
        if action.ledger is not None:
            self._report(action.incarnation, self._written(action.incarnation, action.step))

    def _report(self, incarnation: int, news: Coroutine[Any, Any, Event]) -> None:
        """Wait for news in the background and post it; what fails is posted as TrainerFailed."""
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
        async with self._versions:  # the machine takes no version that is older than its last
            published = await self._trainer.wait_published(step, patience_s=self._patience_s)
        return VersionPublished(incarnation, published)

    async def _written(self, incarnation: int, step: int) -> Event:
        waiting = self._trainer.wait_checkpoint(step, patience_s=self._patience_s)
        return await saved_or_not(incarnation, step, waiting)

    async def close(self) -> None:
        await self._background.close()
        await self.processes.close()


async def saved_or_not(incarnation: int, step: int, path: Awaitable[str]) -> Event:
    """What came of a checkpoint: one that cannot be written is no death of the trainer."""
    try:
        return CheckpointSaved(incarnation, step, await path)
    except NotSaved as error:
        return CheckpointFailed(incarnation, step, str(error))
