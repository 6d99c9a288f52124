"""Carries out what the machine wants of the rollout servers, on their hosts.

Every method answers with an event and none raises for something a host, a server or a network may
do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from libra_cli.config.errors import HostError, LibraError, ServerError, StateError, WeightsError
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import (
    AbortTurn,
    CheckServer,
    Generate,
    ServerAction,
    SleepServer,
    StartServer,
    StopServer,
    SyncServer,
    TurnAction,
    WakeServer,
)
from libra_cli.core.events import (
    Event,
    PublishedVersion,
    ServerAsleep,
    ServerChecked,
    ServerFailed,
    ServerStarted,
    ServerStopped,
    ServerSynced,
    SyncFailed,
    TrainerFailed,
    TurnFailed,
    TurnGenerated,
)
from libra_cli.core.launch.joined_slots import slot_named
from libra_cli.core.launch.process import ProcessSpec, process_of
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.progress.watch import ProgressWatch
from libra_cli.core.types import GroupId, Slot, SlotId, node_of
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.processes.owner import STARTUP_TIMEOUT_S, NotConnected, ProcessOwner
from libra_cli.runtime.rollout.connection import (
    SLEEP_S,
    CanSleep,
    Sampling,
    ServerConnection,
    ServerFacts,
    ServerUnreachable,
    connect_with,
    turn_failed,
)
from libra_cli.runtime.rollout.decode_check import DecodeCheck
from libra_cli.runtime.rollout.server_probes import PROBE_S, ServerProbes
from libra_cli.runtime.store.images import ImageStore
from libra_cli.runtime.weights.probe_bounds import GapBounds, probe_gap
from libra_cli.runtime.weights.versions import Weights

CHECK_EVERY_S = 0.5
LOAD_BYTES_S = 100e6
"""What a server loads at least in a second of a version that its workers have in memory already; a
server on two cores loads 0.4B parameters in 6 s, most of it repacking for its kernels."""

_log = logging.getLogger(__name__)


class Servers:
    """The rollout servers of a run, as processes and as connections to them."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        weights: Weights,
        slots: Mapping[SlotId, Slot],
        sampling: Callable[[GroupId], Sampling],
        *,
        images: ImageStore | None = None,
        post: Callable[[Event], None],
    ) -> None:
        """``sampling`` says how the turns of a group are sampled; ``images`` has what trajectories
        were shown."""
        self._recipe = recipe
        self._cluster = cluster
        self._weights = weights
        self._slots = slots
        self._sampling = sampling
        self._images = images
        self._post = post
        self._spec = recipe.weight_sync
        self._bounds = GapBounds(self._spec.tolerance)
        self._decoding = DecodeCheck(recipe.model, self._spec.tolerance)
        self.processes: ProcessOwner[ServerConnection] = ProcessOwner(
            cluster, connect=connect_with(recipe.rollout.backend), failed=ServerFailed, post=post
        )
        self._probes = ServerProbes(
            cluster, on_gpus=lambda node: recipe.node(node).gpus > 0, post=post
        )

    async def facts(self, slot: SlotId) -> ServerFacts:
        """What the server of a slot says of itself. Raises LibraError."""
        return await self.processes.connection(slot).facts()

    async def perform(self, action: ServerAction | TurnAction) -> Event | None:
        """Carry out whatever the machine wants of a server."""
        match action:
            case StartServer():
                return await self.start(action)
            case CheckServer():
                return await self.check(action)
            case StopServer():
                return await self.stop(action)
            case SleepServer() | WakeServer():
                return await self.processes.during(
                    action.slot, action.incarnation, self._sleep_or_wake(action)
                )
            case SyncServer():
                return await self.sync(action)
            case Generate():
                return await self.generate(action)
            case AbortTurn():
                await self.abort(action)
                return None
            case _:
                assert_never(action)

    async def start(self, action: StartServer) -> Event | None:
        """Start the process and wait until it generates."""
        return await self.processes.during(action.slot, action.incarnation, self._start(action))

    async def _start(self, action: StartServer) -> Event:
        slot, incarnation = action.slot, action.incarnation
        server = await self.processes.start(slot, incarnation, [await self._process(action)])
        await server.wait_ready(timeout_s=STARTUP_TIMEOUT_S)
        facts = await server.facts()
        self._probes.add(slot, server)
        return ServerStarted(slot, incarnation, facts.engine)

    async def _process(self, action: StartServer) -> ProcessSpec:
        slot, cluster = slot_named(action.slot, self._slots), self._cluster
        shares = self._recipe.node(slot.node).share is not None
        return server_process(
            self._recipe,
            slot,
            action.bucket,
            cluster.facts[slot.node],
            model_dir=cluster.model_dirs[slot.node],
            shape=await cluster.models.architecture(slot.node) if shares else None,
        )

    async def adopt(self, action: StartServer) -> None:
        """Connect to the process that was started so, by whomever. Raises HostError."""
        slot, incarnation = action.slot, action.incarnation
        processes = [await self._process(action)]
        server = await self.processes.adopt(slot, incarnation, processes)
        self._probes.add(slot, server)

    async def stop(self, action: StopServer) -> Event:
        """Stop the server's process, with everything that it has started."""
        if (server := self.processes.get(action.slot)) is not None:
            self._probes.forget(server)
        place = node_of(action.slot), process_of(action.slot)
        lost = await self.processes.stop(action.slot, place)
        return ServerStopped(action.slot, action.incarnation, lost)

    async def _sleep_or_wake(self, action: SleepServer | WakeServer) -> Event:
        """Have a server give back its memory, or take it again. Raises LibraError."""
        slot, incarnation = action.slot, action.incarnation
        server = self.processes.connection(slot)
        if server.incarnation != incarnation:
            self._probes.forget(server)
            server = await self.processes.renew(slot, incarnation)
            self._probes.add(slot, server)
        if not isinstance(server, CanSleep):
            raise ServerError(f"{slot}: servers of this backend cannot sleep")
        with self._probes.loading(server, SLEEP_S):
            if isinstance(action, SleepServer):
                await server.sleep()
                return ServerAsleep(slot, incarnation)
            await server.wake()
            return ServerStarted(slot, incarnation)

    async def sync(self, action: SyncServer) -> Event:
        """Fetch, load in flight, have it proved, and compare the probe with the trainer's own."""
        gap: float | None = None
        answered = True
        try:
            server = self.processes.connection(action.slot)
            node = node_of(action.slot)
            place = await self._weights.on(node, action.published)
            load_s = await self._load(server, place.directory, action.published)
            served_at = self._cluster.clock()
            probe = await self._weights.probe(action.published)
            measured = await server.probe(probe.token_ids, action.published)
            gap = probe_gap(probe.logprobs, measured)
            reason = self._bounds.reason(
                action.slot, action.incarnation, gap
            ) or await self._decodes(server, action, probe.token_ids)
            if not reason:
                return ServerSynced(
                    action.slot,
                    action.incarnation,
                    action.published,
                    gap=gap,
                    pull_s=place.pull_s,
                    load_s=load_s,
                    served_at=served_at,
                    sent_bytes=place.sent_bytes,
                    kind=place.kind,
                    detail=place.detail,
                )
        except NotConnected:
            reason = "the server was stopped meanwhile"
        except (ServerUnreachable, HostError, WeightsError) as error:
            # A network, a disk or the publishing host: not the server's own answer. Not at once
            # again, and not before that host is back.
            reason, answered = str(error), False
            await asyncio.sleep(CHECK_EVERY_S)
            await self._cluster.until_back(self._weights.origin)
        except LibraError as error:
            reason, answered = await self._blame(action, error)
        return SyncFailed(action.slot, action.incarnation, action.published, reason, answered, gap)

    async def _decodes(
        self, server: ServerConnection, action: SyncServer, prompt: Sequence[int]
    ) -> str:
        slot = slot_named(action.slot, self._slots)
        with self._probes.turn(server):
            return await self._decoding.reason(server, slot, action, prompt)

    async def _blame(self, action: SyncServer, error: LibraError) -> tuple[str, bool]:
        """Why a server did not take a version, and whether that is its own answer.

        Not if the version itself is damaged: no other process would take it either. The trainer
        writes its own again from memory; one that does not do that fails.
        """
        node, version = node_of(action.slot), action.published.version
        damage = await self._weights.damage(node, action.published)
        if not damage:
            return str(error), True
        at_origin = node == self._weights.origin
        if at_origin and not await self._weights.renewed(action.published):
            self._post(TrainerFailed(version.trainer_incarnation, f"{damage}, where it was made"))
        await asyncio.sleep(CHECK_EVERY_S)
        return f"{damage}: {error}", False

    async def _load(
        self, server: ServerConnection, directory: str, published: PublishedVersion
    ) -> float:
        load_s = published.bytes / LOAD_BYTES_S
        limit_s = self._spec.timeout_s + load_s
        # An adapter is merged into a base whose size is not known here.
        silent_s = limit_s if self._recipe.training.lora else load_s
        with self._probes.loading(server, silent_s):
            return await server.load(
                directory,
                published,
                timeout_s=limit_s,
                partly=self._spec.tolerance is not None,
                clear_cache=self._spec.clear_cache,
            )

    async def check(self, action: CheckServer) -> Event | None:
        """Ask until it answers; time counts only while its host can be reached."""
        watch, node = ProgressWatch(), node_of(action.slot)
        while (server := self.processes.get(action.slot, action.incarnation)) is not None:
            with contextlib.suppress(LibraError, TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await server.check()
                return ServerChecked(action.slot, action.incarnation)
            reachable = self._probes.can_answer(node)
            if watch.look(None, now=self._cluster.clock(), reachable=reachable):
                reason = await self._probes.reason(action.slot, server, watch.silent_s)
                return ServerFailed(action.slot, action.incarnation, reason)
            await asyncio.sleep(CHECK_EVERY_S)
        return None

    async def generate(self, action: Generate) -> TurnGenerated | TurnFailed:
        """Have the server that the machine chose generate a turn. The turn's start is told by the
        run's clock, as its other times are."""
        server, began = self.processes.get(action.slot), self._cluster.clock()
        if server is None:
            return turn_failed(action, "the server was stopped meanwhile")
        with self._probes.turn(server):
            try:
                images = () if self._images is None else self._images.of(action.trajectory)
            except StateError as error:
                return turn_failed(action, str(error))
            sampling = self._sampling(action.trajectory.group)
            answer = await server.generate(action, sampling, images)
        return replace(answer, started_at=began) if isinstance(answer, TurnGenerated) else answer

    async def abort(self, action: AbortTurn) -> None:
        """End a generation; its own reply comes with what there is."""
        server = self.processes.get(action.slot, action.incarnation)
        if server is None:
            return
        try:
            await server.abort(action.request)
        except LibraError as error:
            # Whoever drains the server has a deadline; the turn is generated again then.
            _log.debug("no abort of %d on %s: %s", action.request, action.slot, error)

    async def sample(self) -> None:
        """Read every running server's counters, for ever, and tell which has stalled."""
        await self._probes.run()
