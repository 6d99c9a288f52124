"""Carries out what the machine wants of the gradient workers, on their hosts.

Every method answers with an event and none raises for something a host, a worker or a network may
do. What goes wrong with a share is not told here: the core sees it, computes the share itself and
says so in the step's metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, assert_never

from libra_cli.config.errors import HostError, LibraError, WeightsError
from libra_cli.core.actions import (
    BatchPartition,
    StartWorker,
    StopWorker,
    SyncWorker,
    Train,
    WorkerAction,
)
from libra_cli.core.events import (
    Event,
    PublishedVersion,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
    WorkerSynced,
    WorkerSyncFailed,
)
from libra_cli.core.launch.process import ProcessSpec, worker_of, worker_ports
from libra_cli.core.launch.trainer_backend import WorkerLaunch, worker_process
from libra_cli.core.types import Slot, SlotId, WeightVersion
from libra_cli.runtime.credentials.authority import peer_url
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.cluster import Cluster, how_it_ended
from libra_cli.runtime.processes.tasks import ProcessTasks
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.trainer.connection import Unreachable, WorkerConnection, connect_worker_with
from libra_cli.runtime.trainer.rank_watch import RankWatch
from libra_cli.runtime.weights.probe_bounds import ProbeBounds
from libra_cli.runtime.weights.versions import Weights

_log = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 1800.0
LOAD_BYTES_S = 100e6
"""What a worker reads of a version at least in a second, from a slow disk."""
MEMORY_FACTOR = 3.0
"""Memory a worker needs on a host without GPUs, in sizes of the fp32 model: parameters, gradients,
and what waits to be fetched; activations come on top and are small beside a server's."""


class WorkerProcesses:
    """The gradient workers of a run, as processes and as HTTP endpoints."""

    def __init__(
        self,
        cluster: Cluster,
        weights: Weights,
        slots: Mapping[SlotId, Slot],
        *,
        post: Callable[[Event], None],
    ) -> None:
        self._cluster = cluster
        self._weights = weights
        self._slots = slots
        self._post = post
        self._spec = cluster.recipe.weight_sync
        self._bounds = ProbeBounds(self._spec.tolerance)
        self._connect = connect_worker_with(cluster.recipe.training.backend)
        self._workers: dict[SlotId, WorkerConnection] = {}
        #: The incarnation of the process on each slot, from before it starts until it is stopped.
        self._incarnations: dict[SlotId, int] = {}
        self._tasks = ProcessTasks()
        self._background = Background()
        self._watching: dict[SlotId, asyncio.Task[None]] = {}
        #: Set once the worker of a slot has proved a version, by name.
        self._proved: defaultdict[tuple[SlotId, str], asyncio.Event] = defaultdict(asyncio.Event)

    # -- coming and going -----------------------------------------------------------------------

    async def perform(self, action: WorkerAction) -> Event | None:
        """Carry out whatever the machine wants of a gradient worker."""
        match action:
            case StartWorker():
                return await self.start(action)
            case SyncWorker():
                return await self.sync(action)
            case StopWorker():
                return await self.stop(action)
            case _:
                assert_never(action)

    async def start(self, action: StartWorker) -> Event | None:
        """Start the process and wait until its world is whole."""
        self._forget_versions(action.slot)
        self._incarnations[action.slot] = action.incarnation
        return await self._while_alive(action.slot, action.incarnation, self._start(action))

    async def _start(self, action: StartWorker) -> Event:
        await self._check_memory(self._slots[action.slot])
        await self._cluster.start(self._process(action))
        worker = await self._connected(action)
        await worker.wait_ready(timeout_s=STARTUP_TIMEOUT_S)
        return WorkerStarted(action.slot, action.incarnation)

    def _process(self, action: StartWorker) -> ProcessSpec:
        slot, cluster = self._slots[action.slot], self._cluster
        launch = WorkerLaunch(
            slot=slot,
            facts=cluster.facts[slot.node],
            run_id=cluster.run_id,
            incarnation=action.incarnation,
            ports=cluster.ports[slot.node],
            model_dir=cluster.model_dirs[slot.node],
        )
        return worker_process(cluster.recipe, launch)

    async def _connected(self, action: StartWorker) -> WorkerConnection:
        spec = self._process(action)
        self._watch(action, spec)
        endpoint = await self._cluster.dial(spec)
        await self._forget(action.slot)
        worker = self._connect(action.incarnation, endpoint, self._cluster.token)
        self._workers[action.slot] = worker
        return worker

    async def adopt(self, action: StartWorker, proved: PublishedVersion | None) -> None:
        """Connect to the process that was started so, and has proved a version, if any.

        Raises:
            HostError: its host cannot be reached.
        """
        self._incarnations[action.slot] = action.incarnation
        await self._connected(action)
        if proved is not None:
            self._proved[action.slot, proved.name].set()

    def _watch(self, action: StartWorker, spec: ProcessSpec) -> None:
        self._watch_no_more(action.slot)
        self._watching[action.slot] = self._background.keep(
            f"watching the ranks of {action.slot}",
            lambda: self._until_stalled(action.slot, action.incarnation, spec),
        )

    async def _until_stalled(self, slot: SlotId, incarnation: int, spec: ProcessSpec) -> None:
        """Find a rank that stops or does not go on."""
        reason = await RankWatch(self._cluster, [spec], incarnation).until_stalled()
        self._tasks.end(slot)
        self._post(WorkerFailed(slot, incarnation, reason))

    def _watch_no_more(self, slot: SlotId) -> None:
        watching = self._watching.pop(slot, None)
        if watching is not None:
            watching.cancel()

    async def _check_memory(self, slot: Slot) -> None:
        """Refuse before anything starts what a host's memory cannot hold. GPUs say so themselves.

        Raises:
            LibraError: too little memory is free.
        """
        size = self._weights.newest_bytes
        if slot.gpus or not size:
            return
        free = (await self._cluster.hosts[slot.node].facts()).mem_free
        needed = int(size * MEMORY_FACTOR)
        if free < needed:
            raise LibraError(
                f"{slot.node} has {free / 2**30:.1f} GiB of memory free, a gradient worker needs "
                f"about {needed / 2**30:.1f}"
            )

    async def _while_alive(
        self, slot: SlotId, incarnation: int, work: Coroutine[Any, Any, Event]
    ) -> Event | None:
        return await self._tasks.during(slot, work, partial(WorkerFailed, slot, incarnation))

    async def stop(self, action: StopWorker) -> Event:
        """Stop the process and everything it started."""
        self._watch_no_more(action.slot)
        self._tasks.end(action.slot)
        self._incarnations.pop(action.slot, None)
        await self._forget(action.slot)
        slot = self._slots[action.slot]
        await self._cluster.stop(slot.node, worker_of(slot.id))
        return WorkerStopped(action.slot, action.incarnation)

    async def _forget(self, slot: SlotId) -> None:
        worker = self._workers.pop(slot, None)
        if worker is not None:
            await worker.close()

    def exited(self, event: Exited) -> None:
        """The agent reports that a worker's process is gone."""
        for slot, incarnation in list(self._incarnations.items()):
            if self._slots[slot].node == event.node and worker_of(slot) == event.process:
                if event.requested:
                    continue
                self._tasks.end(slot)
                self._post(WorkerFailed(slot, incarnation, f"its process {how_it_ended(event)}"))

    # -- versions and shares --------------------------------------------------------------------

    async def sync(self, action: SyncWorker) -> Event | None:
        """Fetch the version, load it, compare the probe with the trainer's."""
        return await self._while_alive(action.slot, action.incarnation, self._try_sync(action))

    async def _try_sync(self, action: SyncWorker) -> Event:
        try:
            return await self._sync(action)
        except (Unreachable, HostError, WeightsError) as error:
            # A network, a disk or the publishing host: not the worker's own answer.
            return WorkerSyncFailed(action.slot, action.incarnation, action.published, str(error))

    async def _sync(self, action: SyncWorker) -> Event:
        worker, published = self._workers[action.slot], action.published
        place = await self._weights.on(self._slots[action.slot].node, published)
        began = time.monotonic()
        timeout_s = self._spec.timeout_s + published.bytes / LOAD_BYTES_S
        gap = await worker.load(place.directory, published, timeout_s=timeout_s)
        reason = self._bounds.reason(action.slot, action.incarnation, gap)
        if reason:
            return WorkerFailed(action.slot, action.incarnation, reason)
        self._forget_versions(action.slot)
        self._proved[action.slot, published.name].set()
        return WorkerSynced(
            action.slot,
            action.incarnation,
            published,
            gap=gap,
            pull_s=place.pull_s,
            load_s=time.monotonic() - began,
            loaded_at=self._cluster.clock(),
        )

    def _forget_versions(self, slot: SlotId) -> None:
        """What the slot's worker has proved before counts no more; who waits goes on waiting."""
        for key in [key for key, proved in self._proved.items() if proved.is_set()]:
            if key[0] == slot:
                del self._proved[key]

    @asynccontextmanager
    async def handing_out(self, action: Train) -> AsyncIterator[list[dict[str, object]]]:
        """Give every worker its share of a step, once it has proved the version the core holds.

        Yields what the core must know to fetch the results. The core is not kept waiting for it:
        it begins with its own part, and computes a share that nobody took in time.
        """
        giving = Background()
        for share in action.shares:
            giving.start(f"giving {share.slot} its share", self._give(action, share))
        try:
            yield [self._described(share, action.held) for share in action.shares]
        finally:
            await giving.close()

    async def _give(self, action: Train, share: BatchPartition) -> None:
        await self._proved[share.slot, action.held.name].wait()
        worker, given = self._workers.get(share.slot), set(share.trajectories)
        if worker is None or worker.incarnation != share.incarnation:
            return
        samples = [s for s in action.samples if s.trajectory.id in given]
        try:
            await worker.share(action.step, action.held, samples)
        except LibraError as error:
            _log.debug("no share of step %d for %s: %s", action.step, share.slot, error)

    def _described(self, share: BatchPartition, held: WeightVersion) -> dict[str, object]:
        return {
            "worker": share.slot,
            "incarnation": share.incarnation,
            "url": self._url(share.slot),
            "version": held.name,
            "trajectories": [[one.group, one.member] for one in share.trajectories],
        }

    def _url(self, slot: SlotId) -> str:
        node, (side, _) = self._slots[slot].node, worker_ports(self._slots[slot])
        port = self._cluster.ports[node][side]
        return peer_url(self._cluster.facts[node].peer_address.serves_at, port, node)

    async def close(self) -> None:
        """Drop every connection."""
        await self._background.close()
        for slot in list(self._workers):
            await self._forget(slot)
