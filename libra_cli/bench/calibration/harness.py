"""The servers and the trainer of a recipe, up and idle, for somebody who measures them.

The same hosts, commands and processes as a run's (``Cluster``, ``Servers``,
``TrainerProcesses``), without a machine: nothing happens but what is asked for. Whatever goes
wrong, ``close`` ends every agent with all it has started.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from libra_cli.config.errors import LibraError, ProcessError
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import (
    Generate,
    StartServer,
    StartTrainer,
    SyncServer,
    Train,
    TrainSample,
)
from libra_cli.core.events import (
    Event,
    PublishedVersion,
    ServerFailed,
    ServerStarted,
    ServerSynced,
    StepDone,
    TrainerFailed,
    TrainerStarted,
    TurnGenerated,
    VersionPublished,
)
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.records import NodeRecord, Record
from libra_cli.core.types import Bucket, Seconds, Slot, SlotId, Tokens, TrajectoryId
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.agent_messages import Exited, HostEvent, LeaseExpired
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.threads import Threads
from libra_cli.runtime.rollout.connection import Sampling, ServerFacts
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.weights.versions import weights_of

INCARNATION = 1
"""The incarnation of every server and of the trainer: each is started once."""
_E = TypeVar("_E", bound=Event)
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """The seconds until a version was served, and those in which the engine stood still for it."""

    seconds: Seconds
    stall_s: Seconds


class MeasurementHarness:
    """The servers and the trainer of a recipe, up after ``open``. Raises LibraError, with what a
    process said, for whatever fails.
    """

    def __init__(self, recipe: Recipe, work: Path, *, note: Callable[[str], None]) -> None:
        self.recipe = recipe
        self._work = work
        self._note = note
        self._plan = initial_plan(recipe)
        self._slots = {slot.id: slot for slot in slots_of(recipe)}
        self._cluster = Cluster(
            recipe,
            self._plan,
            run_id=f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            secrets=RunSecrets.new(),
            save=self._save,
            clock=time.time,
        )
        self._sampling = Sampling(
            recipe.rollout.temperature, recipe.rollout.top_p, (), to_the_end=True
        )
        self._threads = Threads("libra-tool")
        self._servers: Servers | None = None
        self._ranks: TrainerProcesses | None = None
        self._requests = 0
        self._step = 0
        self._failure: LibraError | None = None
        #: Versions that are published; None is put there where a host is lost.
        self._told: asyncio.Queue[Event | None] = asyncio.Queue()
        #: What each host says of itself, as JSON, by node.
        self.hosts: dict[str, str] = {}
        self.published: PublishedVersion | None = None
        self._serving: PublishedVersion | None = None
        self.server_start_s: dict[SlotId, Seconds] = {}
        self.trainer_start_s: Seconds = 0.0

    def _save(self, record: Record) -> None:
        if isinstance(record, NodeRecord) and record.facts_json:
            self.hosts[record.node] = record.facts_json

    @property
    def buckets(self) -> Mapping[SlotId, Bucket]:
        """The bucket of every server, by slot."""
        return dict(self._plan.servers)

    @property
    def train_slots(self) -> tuple[Slot, ...]:
        """The slots of the trainer, in the order of its ranks."""
        return tuple(self._slots[slot] for slot in self._plan.train)

    @property
    def model_files(self) -> Path:
        """A copy of the model's small files: its configuration, its tokenizer."""
        return self._work / "model"

    # -- coming and going -----------------------------------------------------------------------

    async def open(self) -> None:
        """Start hosts, then servers, then the trainer, and load its
        first version on every server.
        """
        cluster = self._cluster
        self._note("connecting to the hosts, making the model")
        await cluster.open(self.model_files)
        self._ranks = ranks = TrainerProcesses(
            self.recipe, cluster, self._slots, head=self.train_slots[0].node, post=self._post
        )
        self._servers = Servers(
            self.recipe,
            cluster,
            weights_of(cluster, self.recipe.weight_sync, origin=ranks.head),
            self._slots,
            lambda group: self._sampling,
            post=self._post,
        )
        cluster.events.subscribe(self._happened)
        self._note("starting the servers")
        await asyncio.gather(*(self._start(*pair) for pair in self._plan.servers))
        self._note("starting the trainer")
        began = time.monotonic()
        ids = tuple(slot.id for slot in self.train_slots)
        event = await ranks.perform(StartTrainer(INCARNATION, ids, ""))
        started = self._expect(TrainerStarted, event)
        self.trainer_start_s = time.monotonic() - began
        self.published = started.published
        await self.sync()

    async def _start(self, slot: SlotId, bucket: Bucket) -> None:
        began = time.monotonic()
        action = StartServer(slot, INCARNATION, bucket)
        self._expect(ServerStarted, await self._up(self._servers).start(action))
        self.server_start_s[slot] = time.monotonic() - began

    async def close(self) -> None:
        """End every process that was started; one that could not be proved gone is noted."""
        self._threads.close()
        self._cluster.events.unsubscribe(self._happened)
        if self._servers is not None:
            await self._servers.processes.close()
        if self._ranks is not None:
            await self._ranks.close()
        for line in await self._cluster.close():
            self._note(f"not proved gone: {line}")

    def _happened(self, event: HostEvent) -> None:
        if isinstance(event, Exited):
            self._up(self._servers).processes.exited(event)
            self._up(self._ranks).processes.exited(event)
        elif isinstance(event, LeaseExpired):
            self._failure = ProcessError(f"{event.node}: {event.reason}")
            self._told.put_nowait(None)  # a version is waited for that will not come

    def _post(self, event: Event) -> None:
        """Take what servers and ranks report by themselves:
        failures, and versions that are published.
        """
        if isinstance(event, (ServerFailed, TrainerFailed)):
            self._failure = ProcessError(event.reason)
        if isinstance(event, (TrainerFailed, VersionPublished)):
            self._told.put_nowait(event)

    def _expect(self, kind: type[_E], event: Event | None) -> _E:
        if isinstance(event, kind) and self._failure is None:
            return event
        if self._failure is not None:
            raise self._failure
        reason = getattr(event, "reason", None) or f"{kind.__name__} did not come, but {event}"
        raise ProcessError(str(reason))

    @staticmethod
    def _up(part: _Part | None) -> _Part:
        assert part is not None, "the harness is not open"
        return part

    # -- what can be asked ----------------------------------------------------------------------

    async def facts(self, slot: SlotId) -> ServerFacts:
        return await self._up(self._servers).facts(slot)

    async def turn(self, slot: SlotId, prompt: array[int], tokens: Tokens) -> None:
        """Generate exactly ``tokens`` tokens after ``prompt`` on the server of a slot."""
        assert self._serving is not None
        self._requests += 1
        action = Generate(
            request=self._requests,
            trajectory=TrajectoryId(0, 0),
            slot=slot,
            incarnation=INCARNATION,
            prompt_ids=prompt,
            max_tokens=tokens,
            cache_key=self._serving.version,
            priority=0,
        )
        self._expect(TurnGenerated, await self._up(self._servers).generate(action))

    async def tool(self) -> None:
        """Call a tool that does nothing: to a thread and back, as every call of a run."""
        loop = asyncio.get_running_loop()
        back: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not back.done():
                back.set_result(None)

        self._threads.run(lambda: loop.call_soon_threadsafe(settle))
        await back

    @property
    def _newest(self) -> PublishedVersion:
        assert self.published is not None, "the harness is not open"
        return self.published

    async def train(self, samples: Sequence[TrainSample]) -> Seconds:
        """Take an optimizer step, and return the seconds until its version is published."""
        self._step += 1
        began = time.monotonic()
        held = self._newest.version
        action = Train(INCARNATION, self._step, tuple(samples), None, held=held)
        self._expect(StepDone, await self._up(self._ranks).perform(action))
        self.published = self._expect(VersionPublished, await self._told.get()).published
        return time.monotonic() - began

    async def sync(self) -> list[SyncTiming]:
        """Load the newest version on every server and prove it."""
        synced = list(await asyncio.gather(*(self._sync(slot) for slot in self.buckets)))
        self._serving = self.published
        return synced

    async def _sync(self, slot: SlotId) -> SyncTiming:
        assert self.published is not None
        began = time.monotonic()
        action = SyncServer(slot, INCARNATION, self.published)
        synced = self._expect(ServerSynced, await self._up(self._servers).sync(action))
        return SyncTiming(time.monotonic() - began, synced.load_s)
