"""The rollout servers: start, join, sync, take out, start again.

A server is routed to only while it is SERVING, and it is SERVING only after it has *proved*, on a
probe sequence, that it computes with a version the trainer published. From then on it is kept at
the newest version by syncs in flight, one at a time, always to the newest. A server that dies, does
not take a version or computes something else is taken out (its incarnation grows, so whatever it
still says is dropped), stopped, verified gone, and started again: at most ``MAX_RESTARTS`` times,
and only if it has served before; one that never served has a configuration error, and trying again
would hide it.

A request that breaks off may be the server's fault or the network's. The server is *suspect*, and
gets nothing more, until it has answered a check; a cable that is pulled costs no restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from libra_cli.core.actions import (
    Action,
    CheckServer,
    Save,
    StartServer,
    StopServer,
    SyncServer,
)
from libra_cli.core.cluster.replica import Replica, ReplicaState, slot_record
from libra_cli.core.costs.online import LearnedCosts
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.events import (
    PublishedVersion,
    ServerChecked,
    ServerFailed,
    ServerSampled,
    ServerStarted,
    ServerStopped,
    ServerSynced,
    SyncFailed,
)
from libra_cli.core.launch.process import process_of
from libra_cli.core.records import SampleRecord, SyncRecord, to_metrics_json
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.scheduling.server_queues import ServerQueue
from libra_cli.core.types import Bucket, Plan, Role, Seconds, Slot, SlotId

MAX_RESTARTS = 3
MAX_FAILURES = 10
"""Failures without a success after which a server is taken out even if it answers checks."""


class _Counters(NamedTuple):
    """Of a server, at a reading: each only grows."""

    at: Seconds
    tokens: int
    request_s: Seconds
    busy_s: Seconds


class RolloutServers:
    """Every slot that serves, in plan order. Methods return the actions they call for."""

    def __init__(
        self,
        plan: Plan,
        slots: Iterable[Slot],
        scheduler: RequestScheduler,
        cost_of: Callable[[Bucket], ServerCost],
    ) -> None:
        by_id = {slot.id: slot for slot in slots}
        self.slots: dict[SlotId, Replica] = {}
        for slot_id, bucket in plan.servers:
            status = Replica(by_id[slot_id], since=0.0, role=Role.ROLLOUT, bucket=bucket)
            self.slots[slot_id] = status
        self.latest: PublishedVersion | None = None
        self._scheduler = scheduler
        self._costs = LearnedCosts(cost_of)
        #: Whether the scheduler has yet to hear which servers are routable now.
        self._changed = False
        #: Whether a slot's row has been told since the pool last looked.
        self.stirred = True
        #: Of every server that has served since it was started; it keeps what is inside.
        self._lanes: dict[SlotId, ServerQueue] = {}
        #: Servers taken out since their requests were last queued again.
        self.retired: list[SlotId] = []
        self._samples: dict[SlotId, _Counters] = {}

    # -- what is --------------------------------------------------------------------------------

    def refresh(self, *, now: Seconds) -> None:
        """Tell the scheduler which servers a request may be sent to, if that has changed."""
        if self._changed:
            self._changed = False
            routable = [status for status in self.slots.values() if status.routable]
            lanes = [self._lane(status) for status in routable]
            latest = self.latest.version if self.latest else None
            self._scheduler.refresh(lanes, latest=latest, now=now)

    def _lane(self, status: Replica) -> ServerQueue:
        assert status.bucket is not None
        assert status.verified is not None
        lane = self._lanes.get(status.slot.id)
        if lane is None:
            cost, key = self._costs.of(status.bucket), status.verified.version
            lane = self._lanes[status.slot.id] = ServerQueue(
                status.slot.id, status.bucket, cost, key
            )
        lane.key, lane.bucket = status.verified.version, status.bucket
        return lane

    @property
    def syncing(self) -> bool:
        """Whether a reachable server has not yet proved the newest version."""
        return any(
            status.syncing is not None and status.reachable for status in self.slots.values()
        )

    @property
    def stopped(self) -> bool:
        """Whether no server process can be left."""
        gone = (ReplicaState.IDLE, ReplicaState.FAILED)
        return all(status.state in gone for status in self.slots.values())

    @property
    def all_failed(self) -> str:
        """Why no server will ever serve again; empty while one may."""
        for status in self.slots.values():  # asked after every event; the first mostly answers
            if status.state is not ReplicaState.FAILED and _counts(status):
                return ""
        return "; ".join(f"{s.slot.id}: {s.detail}" for s in self.slots.values() if _counts(s))

    def current(self, slot: SlotId, incarnation: int) -> Replica | None:
        """The slot, if an answer of this incarnation still counts."""
        status = self.slots.get(slot)
        return status if status is not None and status.incarnation == incarnation else None

    # -- what happens ---------------------------------------------------------------------------

    def expect(self, slot: Slot, bucket: Bucket, *, now: Seconds) -> list[Action]:
        """A plan has a server of this shape there; one that failed there before is forgotten."""
        status = self.slots.get(slot.id)
        if status is None:
            status = self.slots[slot.id] = Replica(slot, since=now)
        elif status.state is ReplicaState.FAILED:
            status.reset(now=now)
        if status.bucket is None or not status.bucket.has_shape_of(bucket):
            return []
        status.bucket = bucket
        return [self.record(status, now)]

    def start(self, status: Replica, bucket: Bucket, *, now: Seconds) -> list[Action]:
        """Start a server of this shape on the slot."""
        status.move(ReplicaState.STARTING, now=now)
        status.role, status.bucket = Role.ROLLOUT, bucket
        return [StartServer(status.slot.id, status.incarnation, bucket), self.record(status, now)]

    def started(self, event: ServerStarted, *, now: Seconds) -> list[Action]:
        """Healthy: give it the newest version, if there is one yet."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.state is not ReplicaState.STARTING:
            return []
        status.move(ReplicaState.JOINING, now=now)
        return [*self._sync(status), self.record(status, now)]

    def failed(self, event: ServerFailed, *, now: Seconds) -> list[Action]:
        """The process is gone, or may as well be."""
        status = self.current(event.slot, event.incarnation)
        return [] if status is None else self.take_out(status, event.reason, now=now)

    def take_out(self, status: Replica, why: str, *, now: Seconds) -> list[Action]:
        """Stop routing to a server, drop what it still says, and stop it."""
        if status.state in (ReplicaState.IDLE, ReplicaState.STOPPING, ReplicaState.FAILED):
            return []
        status.move(ReplicaState.STOPPING, now=now, why=why)
        status.retire()
        self._lanes.pop(status.slot.id, None)
        self.retired.append(status.slot.id)
        return [StopServer(status.slot.id, status.incarnation), self.record(status, now)]

    def gone(self, event: ServerStopped, *, now: Seconds, again: bool) -> list[Action]:
        """Verified gone. Start it again if the run goes on and it deserves it."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.state is not ReplicaState.STOPPING:
            return []
        why = status.detail
        status.move(ReplicaState.IDLE, now=now, why=why)
        if not again:
            status.role = Role.IDLE
            return [self.record(status, now)]
        if not status.has_served or status.restarts >= MAX_RESTARTS:
            status.move(ReplicaState.FAILED, now=now, why=why)
            status.role = Role.FAILED
            return [self.record(status, now)]
        status.restarts += 1
        assert status.bucket is not None
        return self.start(status, status.bucket, now=now)

    def publish(self, published: PublishedVersion) -> list[Action]:
        """A new version: every server that can take it does so now."""
        self.latest, self._changed = published, True
        return [action for status in self.slots.values() for action in self._sync(status)]

    def _sync(self, status: Replica) -> list[Action]:
        up = status.state in (ReplicaState.JOINING, ReplicaState.SERVING)
        ready = up and status.reachable and not status.suspect
        if not ready or self.latest is None or status.syncing or status.verified == self.latest:
            return []
        status.syncing = self.latest
        return [SyncServer(status.slot.id, status.incarnation, self.latest)]

    def synced(self, event: ServerSynced, *, now: Seconds) -> list[Action]:
        """Proved. Route to it, and go on to the next version if there is one already."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.syncing != event.published:
            return []
        status.verified, status.syncing, status.failures = event.published, None, 0
        status.loaded_at = event.served_at
        status.unproved.discard(event.published.version)
        if status.state is ReplicaState.JOINING:
            status.move(ReplicaState.SERVING, now=now)
            status.has_served = True
        return [Save(_sync_record(event, now)), *self._sync(status), self.record(status, now)]

    def sync_failed(self, event: SyncFailed, *, now: Seconds) -> list[Action]:
        """Not proved: out, unless only the connection is to blame; then try when it is back."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.syncing != event.published:
            return []
        status.syncing = None
        record: Action = Save(_sync_record(event, now))
        if event.answered:
            return [record, *self.take_out(status, event.reason, now=now)]
        status.unproved.add(event.published.version)
        return [record, *self.request_failed(status, event.reason, now=now)]

    def request_failed(self, status: Replica, reason: str, *, now: Seconds) -> list[Action]:
        """Something broke off on this server; what breaks while it is suspect is the same."""
        if status.suspect or status.state is ReplicaState.STOPPING:
            return []
        status.failures += 1
        if status.failures > MAX_FAILURES:
            return self.take_out(status, f"failed {status.failures} times: {reason}", now=now)
        status.suspect = self._changed = True
        return [CheckServer(status.slot.id, status.incarnation)]

    def checked(self, event: ServerChecked, *, now: Seconds) -> list[Action]:
        """It answers: go on, with the newest version if that was what failed."""
        status = self.current(event.slot, event.incarnation)
        if status is None or not status.suspect:
            return []
        status.suspect = False
        return [*self._sync(status), self.record(status, now)]

    def lost(self, node: str, *, now: Seconds) -> list[Action]:
        """The node does not answer: keep what runs there, send nothing new."""
        return self._reach(node, now, reachable=False)

    def back(self, node: str, alive: frozenset[str], *, now: Seconds) -> list[Action]:
        """The node answers again: go on with the servers that still run."""
        actions = self._reach(node, now, reachable=True)
        for status in self.slots.values():
            if status.slot.node != node or status.state in (ReplicaState.IDLE, ReplicaState.FAILED):
                continue
            if (
                process_of(status.slot.id) not in alive
                and status.state is not ReplicaState.STOPPING
            ):
                actions += self.take_out(status, "died while unreachable", now=now)
            else:
                actions += self._sync(status)
        return actions

    def _reach(self, node: str, now: Seconds, *, reachable: bool) -> list[Action]:
        touched = [status for status in self.slots.values() if status.slot.node == node]
        for status in touched:
            status.reachable = reachable
        return [self.record(status, now) for status in touched]

    def stop(self, why: str, *, now: Seconds) -> list[Action]:
        """Take every server out."""
        return [a for status in self.slots.values() for a in self.take_out(status, why, now=now)]

    # -- what is told ---------------------------------------------------------------------------

    def sampled(self, event: ServerSampled, *, now: Seconds) -> list[Action]:
        """Turn a reading of the server's counters into a rate, and keep it."""
        status = self.current(event.slot, event.incarnation)
        if status is None:
            return []
        status.count(0, now=now)
        this = _Counters(now, event.generated_tokens, status.request_s, status.busy_s)
        before = self._samples.get(event.slot, this)
        self._samples[event.slot] = this
        self._learn(status, before, this)
        seconds = max(now - before.at, 1e-9)
        seats = status.bucket.max_num_seqs if status.bucket else 1
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
        return [Save(sample), self.record(status, now)]

    def _learn(self, status: Replica, before: _Counters, this: _Counters) -> None:
        """What a token took there since the reading before, at the load there was."""
        lane = self._lanes.get(status.slot.id)
        tokens, busy_s = this.tokens - before.tokens, this.busy_s - before.busy_s
        if lane is None or not lane.running or tokens <= 0 or busy_s <= 0:
            return
        request_s = this.request_s - before.request_s
        running = request_s / busy_s
        kv_tokens = running * lane.context / lane.running
        self._costs.observe(
            lane.bucket, running=running, kv_tokens=kv_tokens, step_s=request_s / tokens
        )
        lane.reprice(self._costs.of(lane.bucket))

    def record(self, status: Replica, now: Seconds) -> Save:
        """The slot's row. Whatever is told of a slot may concern the scheduler, and the pool."""
        self._changed = self.stirred = True
        return Save(slot_record(status, now=now, waiting=self._scheduler.waiting(status.slot.id)))

    def check(self) -> None:
        """Invariants that hold between any two events."""
        for status in self.slots.values():
            status.check()
            lane = self._lanes.get(status.slot.id)
            assert lane is None or lane.running == status.running, status.slot.id
        routable = [status.slot.id for status in self.slots.values() if status.routable]
        assert self._changed or routable == list(self._scheduler.queues.by_slot), (
            "the scheduler is behind"
        )


def _counts(status: Replica) -> bool:
    """Whether the plan wants a server there."""
    return status.role is not Role.IDLE


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
        detail="" if done else event.reason if isinstance(event, SyncFailed) else "",
    )
