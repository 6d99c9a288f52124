"""The rollout servers: start, join, sync, take out, start again.

A server is routed to only while it is SERVING, and it is SERVING only after it has *proved*, on a
probe sequence, that it computes with a version the trainer published. From then on it is kept at
the newest version by syncs in flight, one at a time, always to the newest. A server that dies, does
not take a version or computes something else is taken out (its epoch grows, so whatever it still
says is dropped), stopped, verified gone, and started again: at most ``MAX_RESTARTS`` times, and
only if it has served before; one that never served has a configuration error, and trying again
would hide it.

A request that breaks off may be the server's fault or the network's. The server is *doubted*, and
gets nothing more, until it has answered a check; a cable that is pulled costs no restart.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra_cli.core.actions import (
    Action,
    CheckServer,
    Save,
    StartServer,
    StopServer,
    SyncServer,
)
from libra_cli.core.commands import process_of
from libra_cli.core.events import (
    Published,
    ServerChecked,
    ServerFailed,
    ServerSampled,
    ServerStarted,
    ServerStopped,
    ServerSynced,
    SyncFailed,
)
from libra_cli.core.policies import ServerView
from libra_cli.core.records import SampleRecord, SyncRecord
from libra_cli.core.slots import SlotState, SlotStatus, slot_record
from libra_cli.core.types import Plan, Role, Seconds, Slot, SlotId

MAX_RESTARTS = 3
MAX_FAILURES = 10
"""Failures without a success after which a server is taken out even if it answers checks."""


class Fleet:
    """Every slot that serves, in plan order. Methods return the actions they call for."""

    def __init__(self, plan: Plan, slots: Iterable[Slot]) -> None:
        by_id = {slot.id: slot for slot in slots}
        self.slots: dict[SlotId, SlotStatus] = {}
        for slot_id, bucket in plan.servers:
            status = SlotStatus(by_id[slot_id], since=0.0, role=Role.ROLLOUT, bucket=bucket)
            self.slots[slot_id] = status
        self.latest: Published | None = None
        #: Requests that wait for a seat.
        self.gate = 0
        self._samples: dict[SlotId, tuple[Seconds, int, Seconds]] = {}

    # -- what is --------------------------------------------------------------------------------

    def views(self) -> list[ServerView]:
        """The servers a request may be sent to."""
        return [
            ServerView(status.slot.id, status.bucket, status.running)
            for status in self.slots.values()
            if status.routable and status.bucket is not None
        ]

    @property
    def seats(self) -> int:
        """Requests that all routable servers can take together."""
        return sum(view.bucket.max_num_seqs for view in self.views())

    @property
    def syncing(self) -> bool:
        """Whether a reachable server has not yet proved the newest version."""
        return any(
            status.syncing is not None and status.reachable for status in self.slots.values()
        )

    @property
    def stopped(self) -> bool:
        """Whether no server process can be left."""
        gone = (SlotState.IDLE, SlotState.FAILED)
        return all(status.state in gone for status in self.slots.values())

    @property
    def hopeless(self) -> str:
        """Why no server will ever serve again; empty while one may."""
        if any(status.state is not SlotState.FAILED for status in self.slots.values()):
            return ""
        return "; ".join(f"{s.slot.id}: {s.detail}" for s in self.slots.values())

    def current(self, slot: SlotId, epoch: int) -> SlotStatus | None:
        """The slot, if an answer of this epoch still counts."""
        status = self.slots.get(slot)
        return status if status is not None and status.epoch == epoch else None

    # -- what happens ---------------------------------------------------------------------------

    def start(self, *, now: Seconds) -> list[Action]:
        """Start a server on every slot."""
        return [a for status in self.slots.values() for a in self._start(status, now)]

    def _start(self, status: SlotStatus, now: Seconds) -> list[Action]:
        assert status.bucket is not None
        status.move(SlotState.STARTING, now=now)
        return [StartServer(status.slot.id, status.epoch, status.bucket), self.record(status, now)]

    def started(self, event: ServerStarted, *, now: Seconds) -> list[Action]:
        """Healthy: give it the newest version, if there is one yet."""
        status = self.current(event.slot, event.epoch)
        if status is None or status.state is not SlotState.STARTING:
            return []
        status.move(SlotState.JOINING, now=now)
        return [*self._sync(status), self.record(status, now)]

    def failed(self, event: ServerFailed, *, now: Seconds) -> list[Action]:
        """The process is gone, or may as well be."""
        status = self.current(event.slot, event.epoch)
        return [] if status is None else self.take_out(status, event.reason, now=now)

    def take_out(self, status: SlotStatus, why: str, *, now: Seconds) -> list[Action]:
        """Stop routing to a server, drop what it still says, and stop it."""
        if status.state in (SlotState.IDLE, SlotState.STOPPING, SlotState.FAILED):
            return []
        status.move(SlotState.STOPPING, now=now, why=why)
        status.retire()
        return [StopServer(status.slot.id, status.epoch), self.record(status, now)]

    def gone(self, event: ServerStopped, *, now: Seconds, again: bool) -> list[Action]:
        """Verified gone. Start it again if the run goes on and it deserves it."""
        status = self.current(event.slot, event.epoch)
        if status is None or status.state is not SlotState.STOPPING:
            return []
        why = status.detail
        status.move(SlotState.IDLE, now=now, why=why)
        if not again:
            status.role = Role.IDLE
            return [self.record(status, now)]
        if not status.has_served or status.restarts >= MAX_RESTARTS:
            status.move(SlotState.FAILED, now=now, why=why)
            status.role = Role.FAILED
            return [self.record(status, now)]
        status.restarts += 1
        return self._start(status, now)

    def publish(self, published: Published) -> list[Action]:
        """A new version: every server that can take it does so now."""
        self.latest = published
        return [action for status in self.slots.values() for action in self._sync(status)]

    def _sync(self, status: SlotStatus) -> list[Action]:
        up = status.state in (SlotState.JOINING, SlotState.SERVING)
        ready = up and status.reachable and not status.doubted
        if not ready or self.latest is None or status.syncing or status.verified == self.latest:
            return []
        status.syncing = self.latest
        return [SyncServer(status.slot.id, status.epoch, self.latest)]

    def synced(self, event: ServerSynced, *, now: Seconds) -> list[Action]:
        """Proved. Route to it, and go on to the next version if there is one already."""
        status = self.current(event.slot, event.epoch)
        if status is None or status.syncing != event.published:
            return []
        status.verified, status.syncing, status.failures = event.published, None, 0
        status.unproved.discard(event.published.key)
        if status.state is SlotState.JOINING:
            status.move(SlotState.SERVING, now=now)
            status.has_served = True
        return [Save(_sync_record(event, now)), *self._sync(status), self.record(status, now)]

    def sync_failed(self, event: SyncFailed, *, now: Seconds) -> list[Action]:
        """Not proved: out, unless only the connection is to blame; then try when it is back."""
        status = self.current(event.slot, event.epoch)
        if status is None or status.syncing != event.published:
            return []
        status.syncing = None
        record: Action = Save(_sync_record(event, now))
        if event.answered:
            return [record, *self.take_out(status, event.reason, now=now)]
        status.unproved.add(event.published.key)
        return [record, *self.stumbled(status, event.reason, now=now)]

    def stumbled(self, status: SlotStatus, reason: str, *, now: Seconds) -> list[Action]:
        """Something broke off on this server; what breaks while it is doubted is the same."""
        if status.doubted or status.state is SlotState.STOPPING:
            return []
        status.failures += 1
        if status.failures > MAX_FAILURES:
            return self.take_out(status, f"failed {status.failures} times: {reason}", now=now)
        status.doubted = True
        return [CheckServer(status.slot.id, status.epoch)]

    def checked(self, event: ServerChecked, *, now: Seconds) -> list[Action]:
        """It answers: go on, with the newest version if that was what failed."""
        status = self.current(event.slot, event.epoch)
        if status is None or not status.doubted:
            return []
        status.doubted = False
        return [*self._sync(status), self.record(status, now)]

    def lost(self, node: str, *, now: Seconds) -> list[Action]:
        """The node does not answer: keep what runs there, send nothing new."""
        return self._reach(node, now, reachable=False)

    def back(self, node: str, alive: frozenset[str], *, now: Seconds) -> list[Action]:
        """The node answers again: go on with the servers that still run."""
        actions = self._reach(node, now, reachable=True)
        for status in self.slots.values():
            if status.slot.node != node or status.state in (SlotState.IDLE, SlotState.FAILED):
                continue
            if process_of(status.slot.id) not in alive and status.state is not SlotState.STOPPING:
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
        status = self.current(event.slot, event.epoch)
        if status is None:
            return []
        status.count(0, now=now)
        this = (now, event.generated_tokens, status.request_s)
        before_at, tokens_before, request_s_before = self._samples.get(event.slot, this)
        self._samples[event.slot] = this
        seconds = max(now - before_at, 1e-9)
        seats = status.bucket.max_num_seqs if status.bucket else 1
        sample = SampleRecord(
            slot=event.slot,
            at=now,
            running=event.running,
            waiting=event.waiting,
            kv_use=event.kv_use,
            prefix_hit_rate=event.prefix_hit_rate,
            preemptions=event.preemptions,
            occupancy=(status.request_s - request_s_before) / (seconds * seats),
            generated_tokens=event.generated_tokens,
            tokens_per_s=max(0, event.generated_tokens - tokens_before) / seconds,
        )
        return [Save(sample), self.record(status, now)]

    def record(self, status: SlotStatus, now: Seconds) -> Save:
        """The slot's row."""
        return Save(slot_record(status, now=now, waiting=self.gate))

    def check(self) -> None:
        """Invariants that hold between any two events."""
        for status in self.slots.values():
            status.check()


def _sync_record(event: ServerSynced | SyncFailed, now: Seconds) -> SyncRecord:
    done = event if isinstance(event, ServerSynced) else None
    return SyncRecord(
        slot=event.slot,
        epoch=event.epoch,
        version=event.published.version,
        trainer_epoch=event.published.trainer_epoch,
        published_at=event.published.at,
        served_at=done.served_at if done else now,
        verified_at=now,
        pull_s=done.pull_s if done else 0.0,
        load_s=done.load_s if done else 0.0,
        bytes=event.published.bytes,
        gap=event.gap,
        verified=done is not None,
        detail="" if done else event.reason if isinstance(event, SyncFailed) else "",
    )
