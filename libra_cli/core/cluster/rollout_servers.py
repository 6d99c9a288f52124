"""The rollout servers: which may be sent requests, what is inside them, what they cost.

A server is routed to only while it is SERVING; ``replica_set`` says how it comes to that. What is
only theirs: a request that breaks off may be the server's fault or the network's. The server is
*suspect*, and gets nothing more, until it has answered a check; a cable that is pulled costs no
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, ClassVar, NamedTuple, assert_never

from libra_cli.core.actions import (
    Action,
    CheckServer,
    Save,
    ServerAction,
    SleepServer,
    StartServer,
    StopServer,
    SyncServer,
    WakeServer,
)
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import GONE_S, ReplicaSet
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.online import LearnedCosts
from libra_cli.core.events import (
    NodeEvent,
    PublishedVersion,
    ServerAsleep,
    ServerChecked,
    ServerEvent,
    ServerFailed,
    ServerSampled,
    ServerStarted,
    ServerStopped,
    ServerSynced,
    SyncFailed,
)
from libra_cli.core.launch.process import process_of
from libra_cli.core.notices import (
    ReplicaChanged,
    Result,
    RoutingChanged,
    ServerAnswered,
    ServerLost,
    ServerProved,
    TurnsBroken,
)
from libra_cli.core.records import SampleRecord, SyncRecord, to_metrics_json
from libra_cli.core.scheduling.server_queues import ServerQueue
from libra_cli.core.types import Bucket, GroupId, Plan, Role, Seconds, Slot, SlotId

MAX_FAILURES = 10
"""Failures without a success after which a server is taken out even if it answers checks."""
SYNC_ATTEMPTS = 2
"""Syncs in a row that a server may answer without proving a version, before it is replaced."""
MAX_BROKEN_SYNCS = 5
"""Syncs in a row that may break off without an answer, however well the server generates meanwhile:
it would serve old weights for ever."""


class _Counters(NamedTuple):
    """Counters of a server at one reading; each only grows."""

    at: Seconds
    tokens: int
    request_s: Seconds
    busy_s: Seconds


class RolloutServers(ReplicaSet):
    """The replicas of all slots that serve or may serve, in plan order, and their queues."""

    events: ClassVar[Any] = ServerEvent | NodeEvent
    actions: ClassVar[Any] = ServerAction
    role = Role.ROLLOUT
    working = ReplicaState.SERVING

    def __init__(
        self,
        plan: Plan,
        slots: Iterable[Slot],
        cost_of: Callable[[Bucket], ServerLaw],
        when_idle: frozenset[SlotId] = frozenset(),
        *,
        may_sleep: bool = False,
    ) -> None:
        super().__init__()
        self.when_idle = when_idle
        """Slots whose GPUs are the trainer's, and whose servers take requests while it waits."""
        self._step_under_way = False
        self.may_sleep = may_sleep
        """Whether a server that leaves its slot keeps its process."""
        by_id = {slot.id: slot for slot in slots}
        for slot_id, bucket in plan.servers:
            replica = Replica(by_id[slot_id], since=0.0, role=Role.ROLLOUT, bucket=bucket)
            self.replicas[slot_id] = replica
        self._costs = LearnedCosts(cost_of)
        #: Of every server that has served since it was started; it keeps what is inside.
        self._queues: dict[SlotId, ServerQueue] = {}
        self._samples: dict[SlotId, _Counters] = {}
        #: Nodes that a run which has no other server waits for no longer.
        self._overdue: set[str] = set()

    def _start_action(self, replica: Replica) -> Action:
        assert replica.bucket is not None
        return StartServer(replica.slot.id, replica.incarnation, replica.bucket)

    def _sync_action(self, replica: Replica, published: PublishedVersion) -> Action:
        return SyncServer(replica.slot.id, replica.incarnation, published)

    def _stop_action(self, replica: Replica) -> Action:
        return StopServer(replica.slot.id, replica.incarnation)

    def _process_of(self, slot: SlotId) -> str:
        return process_of(slot)

    def _taken_out(self, slot: SlotId, *, died: bool) -> list[Result]:
        self._queues.pop(slot, None)
        self._samples.pop(slot, None)  # the counters of its next process begin at 0
        return [ServerLost(slot, died)]

    def _take_in(self, event: ServerEvent, now: Seconds) -> list[Result]:
        match event:
            case ServerSampled():
                return self.sampled(event, now=now)
            case ServerSynced():
                return self.synced(event, now=now)
            case SyncFailed():
                return self.sync_failed(event, now=now)
            case ServerChecked():
                return self.checked(event)
            case ServerStarted() | ServerAsleep():
                return self._obeyed(event, now)
            case ServerFailed():
                return self.failed(event, now=now)
            case ServerStopped():
                return self.gone(event)
            case _:
                assert_never(event)

    def _obeyed(self, event: ServerStarted | ServerAsleep, now: Seconds) -> list[Result]:
        if isinstance(event, ServerAsleep):
            return self.asleep(event, now=now)
        return self.started_with(event, now=now)

    # -- what is --------------------------------------------------------------------------------

    def routable(self) -> list[ServerQueue]:
        """The queues of the servers that a request may be sent to now, in plan order."""
        return [self._queue(self.replicas[slot]) for slot in self.routable_slots]

    @property
    def routable_slots(self) -> list[SlotId]:
        """The slots of the servers that a request may be sent to now, in plan order."""
        held = self.when_idle if self._step_under_way else ()
        every = self.replicas.items()
        return [slot for slot, replica in every if replica.routable and slot not in held]

    def _queue(self, replica: Replica) -> ServerQueue:
        assert replica.bucket is not None
        assert replica.verified is not None
        version, slot = replica.verified.version, replica.slot.id
        queue = self._queues.get(slot)
        if queue is None:
            cost = self._costs.of(replica.bucket)
            queue = self._queues[slot] = ServerQueue(slot, replica.bucket, cost, version)
        queue.key, queue.bucket = version, replica.bucket
        return queue

    @property
    def syncing(self) -> bool:
        """Whether a reachable server has not yet proved the newest version."""
        every = self.replicas.values()
        return any(replica.syncing is not None and replica.reachable for replica in every)

    @property
    def all_failed(self) -> str:
        """Why no server will ever serve again; empty while one may."""
        for replica in self.replicas.values():  # asked after every event; the first mostly answers
            if replica.role is not Role.IDLE and not self._is_hopeless(replica):
                return ""
        wanted = [replica for replica in self.replicas.values() if replica.role is not Role.IDLE]
        return "; ".join(f"{replica.slot.id}: {replica.detail}" for replica in wanted)

    def _is_hopeless(self, replica: Replica) -> bool:
        idle = replica.state is ReplicaState.IDLE
        overdue = idle and replica.slot.node in self._overdue
        return overdue or replica.state is ReplicaState.FAILED

    def node_overdue(self, node: str, *, now: Seconds) -> None:
        """Give up hope for a node that is not back ``GONE_S`` after it was given up."""
        if now - self._gone.get(node, now) >= GONE_S:
            self._overdue.add(node)

    def back(self, node: str, alive: frozenset[str], *, now: Seconds) -> list[Result]:
        """Go on with the processes that still run on a node that answers again."""
        self._overdue.discard(node)
        return super().back(node, alive, now=now)

    # -- what a plan wants ----------------------------------------------------------------------

    def expect_shape(self, slot: Slot, bucket: Bucket, *, now: Seconds) -> list[Result]:
        """Note that a plan has a server of this shape on the slot."""
        replica = self.expect(slot, now=now)
        if replica.bucket is None or not replica.bucket.has_shape_of(bucket):
            return []
        replica.bucket = bucket
        return [ReplicaChanged(replica)]

    def start_shape(self, replica: Replica, bucket: Bucket, *, now: Seconds) -> list[Result]:
        """Start a server of this shape on the slot."""
        replica.bucket = bucket
        return self.start(replica, now=now)

    def drain(self, replica: Replica, why: str, *, now: Seconds) -> list[Result]:
        """Send the server no further request; turns under way may end."""
        replica.move(ReplicaState.DRAINING, now=now, why=why)
        return [ReplicaChanged(replica)]

    def sleep(self, replica: Replica, why: str, *, now: Seconds) -> list[Result]:
        """Have a drained server give its memory back, and keep its process."""
        replica.move(ReplicaState.FALLING_ASLEEP, now=now, why=why)
        replica.retire()
        order = SleepServer(replica.slot.id, replica.incarnation)
        return [order, ReplicaChanged(replica), *self._taken_out(replica.slot.id, died=False)]

    def asleep(self, event: ServerAsleep, *, now: Seconds) -> list[Result]:
        """Give the slot's devices free, since a server that fell asleep does not use them."""
        replica = self.current(event.slot, event.incarnation)
        if replica is None or replica.state is not ReplicaState.FALLING_ASLEEP:
            return []
        replica.move(ReplicaState.ASLEEP, now=now)
        replica.role = Role.IDLE
        return [ReplicaChanged(replica)]

    def wake(self, replica: Replica, *, now: Seconds) -> list[Result]:
        """Have a sleeping server take memory again, to load the newest version."""
        replica.move(ReplicaState.WAKING, now=now)
        replica.role = self.role
        return [WakeServer(replica.slot.id, replica.incarnation), ReplicaChanged(replica)]

    def label_idle(self, wanted: Container[SlotId]) -> None:
        """Show a slot without a process as a server's, if a server is to come there."""
        for slot, replica in self.replicas.items():
            if replica.state in (ReplicaState.IDLE, ReplicaState.ASLEEP):
                replica.role = Role.ROLLOUT if slot in wanted else Role.IDLE

    # -- GPUs shared with the trainer -----------------------------------------------------------

    def step_begins(self) -> list[Result]:
        """Leave the GPUs that are the trainer's to its step; turns there go on elsewhere."""
        self._step_under_way = True
        shared = [slot for slot in self.replicas if slot in self.when_idle]
        broken = [TurnsBroken(slot) for slot in shared if self.replicas[slot].running]
        return [RoutingChanged(), *broken] if shared else []

    def trainer_waits(self) -> bool:
        """Take requests on the trainer's GPUs again, since it has no batch to train; returns
        whether that changes which servers take them."""
        over, self._step_under_way = self._step_under_way, False
        return over and bool(self.when_idle)

    # -- versions -------------------------------------------------------------------------------

    def publish(self, published: PublishedVersion) -> list[Result]:
        """Sync a new version; trajectories begin only on servers that have it."""
        return [RoutingChanged(), *super().publish(published)]

    def synced(self, event: ServerSynced, *, now: Seconds) -> list[Result]:
        """Route requests to a server whose weights are proved."""
        results = self._proved(event, loaded_at=event.served_at, now=now)
        if not results:
            return []
        return [Save(_sync_record(event, now)), *results, ServerProved(event.slot)]

    def sync_failed(self, event: SyncFailed, *, now: Seconds) -> list[Result]:
        """Sync a version again that a server did not prove.

        A broken connection proves nothing: the server tries when it is back. What the server itself
        answered is tried again once, then in a new process.
        """
        replica = self._not_proved(event)
        if replica is None:
            return []
        record = Save(_sync_record(event, now))
        if event.answered:
            return [record, *self._disproved(replica, event, now)]
        replica.unproved.add(event.published.version)
        if self.latest is None:  # it is gone with the trainer's host, by no fault of the server
            return [record]
        replica.broken_syncs += 1
        if replica.broken_syncs >= MAX_BROKEN_SYNCS:
            why = f"{replica.broken_syncs} versions in a row did not reach it: {event.reason}"
            return [record, *self.take_out(replica, why, now=now)]
        return [record, *self._doubt(replica, event.reason, now)]

    def _disproved(self, replica: Replica, event: SyncFailed, now: Seconds) -> list[Result]:
        replica.failed_syncs += 1
        # A server that serves has gone on generating if it came as far as the probe.
        resumed = event.gap is not None and replica.state is ReplicaState.SERVING
        if replica.failed_syncs < SYNC_ATTEMPTS and not resumed:
            return self._sync(replica)
        replica.restarts_unproved = True
        return self.take_out(replica, event.reason, now=now)

    # -- requests -------------------------------------------------------------------------------

    def request_sent(self, slot: SlotId, *, now: Seconds) -> None:
        """Count one more running request."""
        self.replicas[slot].count(+1, now=now)

    def request_ended(self, slot: SlotId, *, answered: bool, now: Seconds) -> None:
        """Count one running request less; with ``answered`` the server
        works, and its failures are forgotten.
        """
        replica = self.replicas[slot]
        replica.count(-1, now=now)
        if answered:
            replica.failures = 0
            replica.broken.clear()

    def request_broke(
        self, slot: SlotId, reason: str, group: GroupId, *, now: Seconds
    ) -> list[Result]:
        """Suspect the server on which a request of ``group`` broke off, and have it checked."""
        replica = self.replicas[slot]
        replica.broken.add(group)
        return self._doubt(replica, reason, now)

    def _doubt(self, replica: Replica, reason: str, now: Seconds) -> list[Result]:
        """Count a failure, and check the server; further failures of
        a suspect server count as the same.
        """
        if replica.suspect or replica.state is ReplicaState.STOPPING:
            return []
        replica.failures += 1
        if replica.failures > MAX_FAILURES:
            return self.take_out(replica, f"failed {replica.failures} times: {reason}", now=now)
        replica.suspect = True
        return [CheckServer(replica.slot.id, replica.incarnation), RoutingChanged()]

    def checked(self, event: ServerChecked) -> list[Result]:
        """Go on with a server that answers, with the newest version if that was what failed."""
        replica = self.current(event.slot, event.incarnation)
        if replica is None or not replica.suspect:
            return []
        replica.suspect = False
        return [ServerAnswered(event.slot), *self._sync(replica), ReplicaChanged(replica)]

    def started_with(self, event: ServerStarted, *, now: Seconds) -> list[Result]:
        """Keep what a server says that it runs, and go on as with any process."""
        replica = self.current(event.slot, event.incarnation)
        if replica is not None:
            replica.engine = event.engine or replica.engine
        return self.started(event, now=now)

    # -- readings -------------------------------------------------------------------------------

    def sampled(self, event: ServerSampled, *, now: Seconds) -> list[Result]:
        """Turn a reading of the server's counters into a rate, and keep it."""
        replica = self.current(event.slot, event.incarnation)
        if replica is None:
            return []
        replica.count(0, now=now)
        this = _Counters(now, event.generated_tokens, replica.request_s, replica.busy_s)
        before = self._samples.get(event.slot, this)
        self._samples[event.slot] = this
        self._learn(event.slot, before, this)
        seconds = max(now - before.at, 1e-9)
        seats = replica.bucket.max_num_seqs if replica.bucket else 1
        sample = SampleRecord(
            slot=event.slot,
            at=now,
            running=event.running,
            waiting=event.waiting,
            kv_use=event.kv_use,
            prefix_hit_rate=event.prefix_hit_rate,
            preemptions=event.preemptions,
            occupancy=(this.request_s - before.request_s) / (seconds * seats),
            generated_tokens=event.generated_tokens,
            tokens_per_s=max(0, this.tokens - before.tokens) / seconds,
            metrics_json=to_metrics_json(event.metrics),
        )
        return [Save(sample), ReplicaChanged(replica)]

    def _learn(self, slot: SlotId, before: _Counters, this: _Counters) -> None:
        """Learn the shape's prices from the tokens and seconds
        between two readings, at the mean load.
        """
        queue = self._queues.get(slot)
        tokens, busy_s = this.tokens - before.tokens, this.busy_s - before.busy_s
        if queue is None or not queue.running or tokens <= 0 or busy_s <= 0:
            return
        request_s = this.request_s - before.request_s
        running = request_s / busy_s
        kv_tokens = running * queue.context / queue.running
        self._costs.observe(
            queue.bucket, running=running, kv_tokens=kv_tokens, step_s=request_s / tokens
        )
        queue.reprice(self._costs.of(queue.bucket))

    def check(self) -> None:
        super().check()
        for slot, replica in self.replicas.items():
            queue = self._queues.get(slot)
            assert queue is None or queue.running == replica.running, slot


def _sync_record(event: ServerSynced | SyncFailed, now: Seconds) -> SyncRecord:
    done = event if isinstance(event, ServerSynced) else None
    return SyncRecord(
        slot=event.slot,
        incarnation=event.incarnation,
        version=event.published.version.step,
        trainer_incarnation=event.published.version.trainer_incarnation,
        published_at=event.published.at,
        served_at=done.served_at if done else now,
        verified_at=now,
        pull_s=done.pull_s if done else 0.0,
        load_s=done.load_s if done else 0.0,
        bytes=event.published.bytes,
        sent_bytes=done.sent_bytes if done else 0,
        kind=done.kind if done else "",
        gap=event.gap,
        verified=done is not None,
        detail=event.detail if isinstance(event, ServerSynced) else event.reason,
    )
