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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from libra_cli.config.errors import HostError, LibraError, WeightsError
from libra_cli.config.recipe import Recipe
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
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.processes.owner import STARTUP_TIMEOUT_S, ProcessOwner
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.trainer.connection import Unreachable, WorkerConnection, connect_worker_with
from libra_cli.runtime.trainer.rank_watch import stalled_rank
from libra_cli.runtime.weights.probe_bounds import GapBounds
from libra_cli.runtime.weights.versions import Weights

_log = logging.getLogger(__name__)

LOAD_BYTES_S = 100e6
"""What a worker reads of a version at least in a second, from a slow disk."""
MEMORY_FACTOR = 3.0
"""Memory a worker needs on a host without GPUs, in sizes of the fp32 model: parameters, gradients,
and what waits to be fetched; activations come on top and are small beside a server's."""


class WorkerProcesses:
    """The gradient workers of a run, as processes and by their control streams."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        weights: Weights,
        slots: Mapping[SlotId, Slot],
        *,
        post: Callable[[Event], None],
    ) -> None:
        self._recipe = recipe
        self._cluster = cluster
        self._weights = weights
        self._slots = slots
        self._spec = recipe.weight_sync
        self._bounds = GapBounds(self._spec.tolerance)
        connect = connect_worker_with(recipe.training.backend)
        self.processes: ProcessOwner[WorkerConnection] = ProcessOwner(
            cluster,
            connect=lambda slot, *reached: connect(*reached),
            failed=WorkerFailed,
            stalled=partial(stalled_rank, cluster),
            post=post,
        )
        #: Set once the worker of a slot has proved a version, by name.
        self._proved: defaultdict[tuple[SlotId, str], asyncio.Event] = defaultdict(asyncio.Event)

    async def perform(self, action: WorkerAction) -> Event | None:
        """Carry out whatever the machine wants of a gradient worker; None if it ends meanwhile."""
        if isinstance(action, StopWorker):
            slot = self._slots[action.slot]
            lost = await self.processes.stop(slot.id, (slot.node, worker_of(slot.id)))
            return WorkerStopped(action.slot, action.incarnation, lost)
        work = self._start(action) if isinstance(action, StartWorker) else self._sync(action)
        return await self.processes.during(action.slot, action.incarnation, work)

    # -- coming ---------------------------------------------------------------------------------

    async def _start(self, action: StartWorker) -> Event:
        self._forget_versions(action.slot)
        await self._check_memory(self._slots[action.slot])
        processes = [await self._process(action)]
        worker = await self.processes.start(action.slot, action.incarnation, processes)
        await worker.wait_ready(timeout_s=STARTUP_TIMEOUT_S)
        return WorkerStarted(action.slot, action.incarnation)

    async def _process(self, action: StartWorker) -> ProcessSpec:
        slot, cluster = self._slots[action.slot], self._cluster
        asks = slot.num_devices > 1 and cluster.facts[slot.node].gpu_gib
        launch = WorkerLaunch(
            slot=slot,
            facts=cluster.facts[slot.node],
            run_id=cluster.run_id,
            incarnation=action.incarnation,
            ports=cluster.ports[slot.node],
            model_dir=cluster.model_dirs[slot.node],
            shape=await cluster.models.architecture(slot.node) if asks else None,
        )
        return worker_process(self._recipe, launch)

    async def adopt(self, action: StartWorker, proved: PublishedVersion | None) -> None:
        """Connect to the process that was started so, and has proved a version, if any.

        Raises:
            HostError: its host cannot be reached.
        """
        await self.processes.adopt(action.slot, action.incarnation, [await self._process(action)])
        if proved is not None:
            self._proved[action.slot, proved.name].set()

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

    # -- versions and shares --------------------------------------------------------------------

    async def _sync(self, action: SyncWorker) -> Event:
        """Fetch the version, load it, compare the probe with the trainer's."""
        try:
            return await self._loaded(action)
        except (Unreachable, HostError, WeightsError) as error:
            # A network, a disk or the publishing host: not the worker's own answer.
            return WorkerSyncFailed(action.slot, action.incarnation, action.published, str(error))

    async def _loaded(self, action: SyncWorker) -> Event:
        worker, published = self.processes.connection(action.slot), action.published
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
        worker = self.processes.get(share.slot, share.incarnation)
        if worker is None:
            return
        given = set(share.trajectories)
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
