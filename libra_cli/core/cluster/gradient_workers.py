"""The gradient workers: whole replicas that compute a share of a step beside the core.

A worker is kept at the newest version by a sync after every step, and computes a share only once it
has proved, on the probe, that it computes with the very version the core holds. The next step may
begin while it is still loading: it is dealt its share all the same, and takes it when it is ready;
one that lies further back has no share in that step. The core computes the share of a worker
that dies, is silent or answers for another step, so nothing here can hold up a step; a worker whose
shares went unused ``MAX_MISSED`` times running is taken out, and so is one that a version did not
reach ``MAX_UNREACHED`` times running: once is no fault of its own, since a trainer that dies takes
its versions with it. Processes are started again as servers are: at most ``MAX_RESTARTS`` times,
and only if they have worked before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra_cli.core.actions import Action, BatchPartition, Save, StartWorker, StopWorker, SyncWorker
from libra_cli.core.cluster.partition import Speeds, deal_shares
from libra_cli.core.cluster.replica import Replica, ReplicaState, slot_record
from libra_cli.core.events import (
    PublishedVersion,
    ShareDone,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
    WorkerSynced,
    WorkerSyncFailed,
)
from libra_cli.core.launch.process import worker_of
from libra_cli.core.rollout.groups import Group
from libra_cli.core.types import Role, Seconds, Slot, SlotId

MAX_RESTARTS = 3
MAX_MISSED = 3
MAX_UNREACHED = 3


class GradientWorkers:
    """Every slot that is, or was, a gradient worker. Methods return the actions they call for."""

    def __init__(self, core_gpus: int) -> None:
        self.slots: dict[SlotId, Replica] = {}
        self.latest: PublishedVersion | None = None
        #: Whether a slot's row has been told since the pool last looked.
        self.stirred = False
        self._speeds = Speeds(core_gpus)
        #: Slots that have a share of the step under way.
        self._sharing: set[SlotId] = set()
        #: Slots whose share has been used since they joined; shares in a row that were not.
        self.used: set[SlotId] = set()
        self._missed: dict[SlotId, int] = {}

    def current(self, slot: SlotId, incarnation: int) -> Replica | None:
        """The slot, if an answer of this incarnation still counts."""
        status = self.slots.get(slot)
        return status if status is not None and status.incarnation == incarnation else None

    @property
    def stopped(self) -> bool:
        """Whether no worker process can be left."""
        return not any(status.up for status in self.slots.values())

    # -- coming and going -----------------------------------------------------------------------

    def of(self, slot: Slot, *, now: Seconds) -> Replica:
        """What is known of the slot as a worker's."""
        return self.slots.setdefault(slot.id, Replica(slot, since=now))

    def expect(self, slot: Slot, *, now: Seconds) -> None:
        """A plan has a worker there; one that failed there before is forgotten."""
        status = self.of(slot, now=now)
        if status.state is ReplicaState.FAILED:
            status.reset(now=now)

    def start(self, status: Replica, *, now: Seconds) -> list[Action]:
        """Start a worker on the slot."""
        status.move(ReplicaState.STARTING, now=now)
        status.role = Role.GRADIENT
        self.used.discard(status.slot.id)
        return [StartWorker(status.slot.id, status.incarnation), self.record(status, now)]

    def started(self, event: WorkerStarted, *, now: Seconds) -> list[Action]:
        """Its world is whole: give it the newest version, if there is one."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.state is not ReplicaState.STARTING:
            return []
        status.move(ReplicaState.JOINING, now=now)
        return [*self._sync(status), self.record(status, now)]

    def publish(self, published: PublishedVersion) -> list[Action]:
        """A new version: every worker that can take it does so now."""
        self.latest = published
        return [action for status in self.slots.values() for action in self._sync(status)]

    def _sync(self, status: Replica) -> list[Action]:
        up = status.state in (ReplicaState.JOINING, ReplicaState.TRAINING) and status.reachable
        if not up or self.latest is None or status.syncing or status.verified == self.latest:
            return []
        status.syncing = self.latest
        return [SyncWorker(status.slot.id, status.incarnation, self.latest)]

    def synced(self, event: WorkerSynced, *, now: Seconds) -> list[Action]:
        """Proved: it may have shares of the next step, or goes on to a version yet newer."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.syncing != event.published:
            return []
        status.verified, status.syncing, status.loaded_at = event.published, None, event.loaded_at
        status.failures = 0
        if status.state is ReplicaState.JOINING:
            status.move(ReplicaState.TRAINING, now=now)
            status.has_served = True
        return [*self._sync(status), self.record(status, now)]

    def sync_failed(self, event: WorkerSyncFailed, *, now: Seconds) -> list[Action]:
        """It has no share until it has a version yet newer."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.syncing != event.published:
            return []
        status.syncing = None
        status.failures += 1
        if status.failures >= MAX_UNREACHED:
            return self.take_out(status, event.reason, now=now)
        return self._sync(status) if self.latest != event.published else []

    def failed(self, event: WorkerFailed, *, now: Seconds) -> list[Action]:
        """The process is gone, or may as well be."""
        status = self.current(event.slot, event.incarnation)
        return [] if status is None else self.take_out(status, event.reason, now=now)

    def leave(self, status: Replica, why: str, *, now: Seconds) -> list[Action]:
        """It gets no more shares; the one it has may end."""
        if status.state is ReplicaState.DRAINING:
            return []
        if status.state is ReplicaState.TRAINING and status.slot.id in self._sharing:
            status.move(ReplicaState.DRAINING, now=now, why=why)
            return [self.record(status, now)]
        return self.take_out(status, why, now=now)

    def take_out(self, status: Replica, why: str, *, now: Seconds) -> list[Action]:
        """Drop what it still says, and stop it. The core computes what it has not."""
        if not status.up or status.state is ReplicaState.STOPPING:
            return []
        status.move(ReplicaState.STOPPING, now=now, why=why)
        status.retire()
        self._sharing.discard(status.slot.id)
        self._missed.pop(status.slot.id, None)
        return [StopWorker(status.slot.id, status.incarnation), self.record(status, now)]

    def gone(self, event: WorkerStopped, *, now: Seconds, again: bool) -> list[Action]:
        """Verified gone. Start it again if the plan has it there and it deserves it."""
        status = self.current(event.slot, event.incarnation)
        if status is None or status.state is not ReplicaState.STOPPING:
            return []
        why = status.detail
        status.move(ReplicaState.IDLE, now=now, why=why)
        status.role = Role.IDLE
        if again and (not status.has_served or status.restarts >= MAX_RESTARTS):
            status.move(ReplicaState.FAILED, now=now, why=why)
            status.role = Role.FAILED
        elif again:
            status.restarts += 1
            return self.start(status, now=now)
        return [self.record(status, now)]

    def stop(self, why: str, *, now: Seconds) -> list[Action]:
        """Take every worker out."""
        return [a for status in self.slots.values() for a in self.take_out(status, why, now=now)]

    # -- the network ----------------------------------------------------------------------------

    def lost(self, node: str, *, now: Seconds) -> list[Action]:
        """The node does not answer: its workers get no share."""
        return self._reach(node, now, reachable=False)

    def back(self, node: str, alive: frozenset[str], *, now: Seconds) -> list[Action]:
        """The node answers again: go on with the workers that still run."""
        actions = self._reach(node, now, reachable=True)
        for status in self.slots.values():
            here = status.slot.node == node and status.up
            if here and status.state is not ReplicaState.STOPPING:
                dead = worker_of(status.slot.id) not in alive
                why = "died while unreachable"
                actions += self.take_out(status, why, now=now) if dead else self._sync(status)
        return actions

    def _reach(self, node: str, now: Seconds, *, reachable: bool) -> list[Action]:
        touched = [status for status in self.slots.values() if status.slot.node == node]
        for status in touched:
            status.reachable = reachable
        return [self.record(status, now) for status in touched]

    # -- shares ---------------------------------------------------------------------------------

    def shares(self, groups: Sequence[Group]) -> tuple[BatchPartition, ...]:
        """What each worker that is ready computes of these groups; the core does the rest."""
        ready = [status for status in self.slots.values() if self._is_ready(status)]
        shares = deal_shares(groups, ready, self._speeds)
        self._sharing = {share.slot for share in shares}
        return shares

    def _is_ready(self, status: Replica) -> bool:
        holds = self.latest is not None and self.latest in (status.verified, status.syncing)
        return status.state is ReplicaState.TRAINING and status.reachable and holds

    def step_over(
        self, done: Iterable[ShareDone], core: tuple[float, float], *, now: Seconds
    ) -> list[Action]:
        """A step is done, or will never be: learn from its shares, let leavers go.

        ``core`` are the tokens and seconds of the core's own part; zeros where it did none.
        """
        actions: list[Action] = []
        self._speeds.core(*core)
        self._sharing.clear()
        for share in done:
            status = self.current(share.slot, share.incarnation)
            if status is not None:
                actions += self._judge(status, share, now)
        for status in self.slots.values():
            if status.state is ReplicaState.DRAINING:
                actions += self.take_out(status, status.detail, now=now)
        return actions

    def _judge(self, status: Replica, share: ShareDone, now: Seconds) -> list[Action]:
        slot = share.slot
        if share.seconds:
            self._speeds.worker(slot, share.tokens, share.seconds)
        if share.used:
            self.used.add(slot)
            self._missed[slot] = 0
            return []
        self._missed[slot] = self._missed.get(slot, 0) + 1
        if self._missed[slot] < MAX_MISSED:
            return []
        why = f"{MAX_MISSED} shares in a row were of no use: {share.reason}"
        return self.take_out(status, why, now=now)

    # -- what is told ---------------------------------------------------------------------------

    def record(self, status: Replica, now: Seconds) -> Save:
        """The slot's row."""
        self.stirred = True
        return Save(slot_record(status, now=now))

    def check(self) -> None:
        """Invariants that hold between any two events."""
        for status in self.slots.values():
            status.check()
        for slot in self._sharing:
            states = (ReplicaState.TRAINING, ReplicaState.DRAINING)
            assert self.slots[slot].state in states, f"{slot} has a share and is not there"
