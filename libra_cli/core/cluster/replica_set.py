"""The life of processes that load weight versions, the same for servers and gradient workers.

    start -> started -> synced -> working, kept at the newest version -> take_out -> gone

A process is of use only once it has *proved* that it computes with a version that the trainer
published: a server by checksums of its tensors, and both on a probe sequence. From then on it is
kept at the newest version, one sync at a time, always to the newest. One that dies or does not
prove a version is taken out (its incarnation grows, so whatever it still says is dropped), stopped,
verified gone, and started again as its budget allows (``restarts``), and only if it has worked
before; one that never worked has a configuration error, and trying again would hide it. (A server
that started and then proved nothing, twice, is started again once.) One whose GPU is lost is given
up at once. What is given up is tried once more after ``LATER_S``, while others work. A node that
does not answer costs nothing until it is back and says which processes are left; on one that is
given up nothing is started, and after ``GONE_S`` its slots have failed until it comes back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, assert_never

from libra_cli.core.actions import (
    Action,
    CheckServer,
    ModelAction,
    Save,
    ServerAction,
    SleepServer,
    StartModel,
    StartServer,
    StartWorker,
    StopModel,
    StopServer,
    StopWorker,
    SyncServer,
    SyncWorker,
    Wake,
    WakeServer,
    WorkerAction,
)
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.restarts import LATER_S, MAX_RESTARTS, told_of
from libra_cli.core.events import (
    ModelFailed,
    ModelStopped,
    NodeBack,
    NodeEvent,
    NodeGone,
    NodeLost,
    PublishedVersion,
    ServerFailed,
    ServerStarted,
    ServerStopped,
    ServerSynced,
    SyncFailed,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
    WorkerSynced,
    WorkerSyncFailed,
)
from libra_cli.core.notices import ProcessGone, ReplicaChanged, Result
from libra_cli.core.records import NoteRecord
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Role, Seconds, Slot, SlotId

GONE_S: Seconds = 3600.0
"""Seconds that a run with nothing else to do waits for a node that was given up. Chosen: a host
that is repaired or rebooted by hand is back by then.
"""


class ReplicaSet(ABC):
    """The replicas of one role, at most one a slot.

    Methods return the actions and notices that follow.
    """

    events: ClassVar[Any]
    actions: ClassVar[Any]
    role: ClassVar[Role]
    working: ClassVar[ReplicaState]
    """The state of a replica that has proved a version."""

    def __init__(self) -> None:
        self.replicas: dict[SlotId, Replica] = {}
        #: Nodes that do not answer; those of them that are given up.
        self._lost: set[str] = set()
        self._gone: dict[str, Seconds] = {}
        self.latest: PublishedVersion | None = None

    # -- what is different ----------------------------------------------------------------------

    @abstractmethod
    def _take_in(self, event: Any, now: Seconds) -> list[Result]:
        """Return what follows from an event of one of the set's processes."""

    @abstractmethod
    def _start_action(self, replica: Replica) -> Action: ...

    @abstractmethod
    def _sync_action(self, replica: Replica, published: PublishedVersion) -> Action: ...

    @abstractmethod
    def _stop_action(self, replica: Replica) -> Action: ...

    @abstractmethod
    def _process_of(self, slot: SlotId) -> str:
        """Return the name of the replica's process on its node."""

    @abstractmethod
    def _taken_out(self, slot: SlotId, *, died: bool) -> list[Result]:
        """Forget what was known of the process there."""

    def handle(self, event: Any, *, now: Seconds) -> list[Result]:
        """Return what follows from an event of a process, or of a node."""
        if isinstance(event, NodeEvent):
            return self._of_node(event, now)
        return self._take_in(event, now)

    # -- what is --------------------------------------------------------------------------------

    def current(self, slot: SlotId, incarnation: int) -> Replica | None:
        """The replica on the slot, if an answer of this incarnation still counts."""
        replica = self.replicas.get(slot)
        return replica if replica is not None and replica.incarnation == incarnation else None

    def wants(self, action: ServerAction | WorkerAction | ModelAction) -> bool:
        """Whether the end of the action is still waited for."""
        replica = self.current(action.slot, action.incarnation)
        if replica is None:
            return False
        match action:
            case StartServer() | StartWorker() | StartModel():
                return replica.state is ReplicaState.STARTING
            case StopServer() | StopWorker() | StopModel():
                return replica.state is ReplicaState.STOPPING
            case SyncServer() | SyncWorker():
                return replica.syncing == action.published
            case CheckServer():
                return replica.suspect
            case SleepServer():
                return replica.state is ReplicaState.FALLING_ASLEEP
            case WakeServer():
                return replica.state is ReplicaState.WAKING
            case _:
                assert_never(action)

    def is_given_up(self, slot: Slot) -> bool:
        """Whether the slot's node is given up and not back, so that nothing is started there."""
        return slot.node in self._gone

    @property
    def nodes_given_up(self) -> frozenset[str]:
        """The nodes that are given up and not back."""
        return frozenset(self._gone)

    @property
    def stopped(self) -> bool:
        """Whether every process of the set is verified gone."""
        return not any(replica.up for replica in self.replicas.values())

    # -- coming and going -----------------------------------------------------------------------

    def at(self, slot: Slot, *, now: Seconds) -> Replica:
        """Return the replica on the slot; a new one if there was none."""
        new = Replica(slot, since=now, reachable=slot.node not in self._lost)
        return self.replicas.setdefault(slot.id, new)

    def expect(self, slot: Slot, *, now: Seconds) -> Replica:
        """Return the replica on a slot that a plan wants a process
        on; earlier failures are forgotten.
        """
        replica = self.at(slot, now=now)
        if replica.state is ReplicaState.FAILED:
            replica.reset(now=now)
        return replica

    def start(self, replica: Replica, *, now: Seconds) -> list[Result]:
        replica.move(ReplicaState.STARTING, now=now)
        replica.role = self.role
        return [self._start_action(replica), ReplicaChanged(replica)]

    def started(self, event: ServerStarted | WorkerStarted, *, now: Seconds) -> list[Result]:
        """Give a healthy process the newest version, if there is one yet."""
        replica = self.current(event.slot, event.incarnation)
        coming = (ReplicaState.STARTING, ReplicaState.WAKING)
        if replica is None or replica.state not in coming:
            return []
        replica.move(ReplicaState.JOINING, now=now)
        return [*self._sync(replica), ReplicaChanged(replica)]

    def failed(
        self, event: ServerFailed | WorkerFailed | ModelFailed, *, now: Seconds
    ) -> list[Result]:
        """The process is gone, or may as well be."""
        replica = self.current(event.slot, event.incarnation)
        return [] if replica is None else self.take_out(replica, event.reason, now=now, died=True)

    def take_out(
        self, replica: Replica, why: str, *, now: Seconds, died: bool = False
    ) -> list[Result]:
        """Ask nothing more of a process, drop what it still says, and stop it."""
        if not replica.up or replica.state is ReplicaState.STOPPING:
            return []
        replica.move(ReplicaState.STOPPING, now=now, why=why)
        replica.retire()
        stop = self._stop_action(replica)
        return [stop, ReplicaChanged(replica), *self._taken_out(replica.slot.id, died=died)]

    def gone(self, event: ServerStopped | WorkerStopped | ModelStopped) -> list[Result]:
        """Return ProcessGone for a process that was being stopped and is verified gone."""
        replica = self.current(event.slot, event.incarnation)
        if replica is None or replica.state is not ReplicaState.STOPPING:
            return []
        replica.lost = event.lost
        return [ProcessGone(replica)]

    def after_end(self, replica: Replica, *, again: bool, now: Seconds) -> list[Result]:
        """Start the process of a replica that ended again, at once or after a rest, or give it up.

        With ``again`` False, or while its node does not answer, it is only left idle.
        """
        why = replica.detail
        replica.move(ReplicaState.IDLE, now=now, why=why)
        replica.role = Role.IDLE
        if not again or not replica.reachable:  # it is started when its node is back
            return [ReplicaChanged(replica)]
        if replica.lost:
            lost = told_of(replica.lost)
            return self._give_up(replica, lost, f"{lost} ({why}); it", now)
        most = MAX_RESTARTS if replica.has_worked else int(replica.restarts_unproved)
        wait_s = replica.budget.wait_s(most)
        if wait_s is None:
            return self._give_up(replica, why, f"{why}; it died too often and", now)
        replica.restarts += 1
        if not wait_s:
            return self.start(replica, now=now)
        replica.resting = True
        replica.detail = f"{why}; it is started again after {wait_s:.0f} s"
        return [Wake(self._timer(replica).name, wait_s), ReplicaChanged(replica)]

    def _give_up(self, replica: Replica, why: str, told: str, now: Seconds) -> list[Result]:
        replica.move(ReplicaState.FAILED, now=now, why=why)
        replica.role = Role.FAILED
        slot = replica.slot
        text = f"{slot.id}: {told} is tried again in {LATER_S / 60:.0f} min; "
        note = NoteRecord("slot", slot.id, now, f"{text}libra logs {slot.node} says more")
        return [Wake(self._timer(replica).name, LATER_S), Save(note), ReplicaChanged(replica)]

    def _timer(self, replica: Replica) -> TimerKey:
        about = (self.role, replica.slot.id, str(replica.incarnation))
        return TimerKey(TimerOwner.REPLICA, about)

    def rested(
        self, timer: TimerKey, restarts: Callable[[Replica], bool], *, now: Seconds
    ) -> list[Result]:
        """Act on a timer: a replica's rest is over, or a replica
        that was given up is tried again.
        """
        role, slot, incarnation = timer.about
        replica = self.current(slot, int(incarnation)) if role == self.role else None
        if replica is None:
            return []
        results: list[Result] = []
        if replica.state is ReplicaState.FAILED and restarts(replica):
            replica.reset(now=now)
            note = NoteRecord("slot", slot, now, f"{slot} is tried again", resolved_at=now)
            results.append(Save(note))
        replica.resting = False
        return [*results, ReplicaChanged(replica)]

    def stop(self, why: str, *, now: Seconds) -> list[Result]:
        every = self.replicas.values()
        return [result for replica in every for result in self.take_out(replica, why, now=now)]

    # -- versions -------------------------------------------------------------------------------

    def publish(self, published: PublishedVersion) -> list[Result]:
        """Sync a new version to every replica that can take it now."""
        self.latest = published
        return [action for replica in self.replicas.values() for action in self._sync(replica)]

    def _sync(self, replica: Replica) -> list[Result]:
        up = replica.state in (ReplicaState.JOINING, self.working)
        answers = up and replica.reachable and not replica.suspect
        if not answers or replica.syncing or self.latest in (None, replica.verified):
            return []
        assert self.latest is not None
        replica.syncing = self.latest
        return [self._sync_action(replica, self.latest)]

    def _proved(
        self, event: ServerSynced | WorkerSynced, *, loaded_at: Seconds, now: Seconds
    ) -> list[Result]:
        """Let a replica that proved a version work, and sync the
        next version if there is one already.
        """
        replica = self.current(event.slot, event.incarnation)
        if replica is None or replica.syncing != event.published:
            return []
        replica.verified, replica.syncing = event.published, None
        replica.failures = replica.failed_syncs = replica.broken_syncs = 0
        replica.loaded_at = loaded_at
        replica.unproved.discard(event.published.version)
        if replica.state is ReplicaState.JOINING:
            replica.move(self.working, now=now)
            replica.has_worked = True
        return [*self._sync(replica), ReplicaChanged(replica)]

    def _not_proved(self, event: SyncFailed | WorkerSyncFailed) -> Replica | None:
        """Return the replica whose sync has failed; None if nothing waits for it."""
        replica = self.current(event.slot, event.incarnation)
        if replica is None or replica.syncing != event.published:
            return None
        replica.syncing = None
        return replica

    # -- the network ----------------------------------------------------------------------------

    def lost(self, node: str) -> list[Result]:
        """Send nothing new to a node that does not answer, and keep what runs there."""
        self._lost.add(node)
        return self._reach(node, reachable=False)

    def node_gone(self, node: str, why: str, *, now: Seconds) -> list[Result]:
        """Take out what ran on a node that is given up; nothing is
        started there until it is back.
        """
        self._gone[node] = now
        results = self.lost(node)
        for replica in self.replicas.values():
            if replica.slot.node == node:
                results += self.take_out(replica, why, now=now)
        return results

    def back(self, node: str, alive: frozenset[str], *, now: Seconds) -> list[Result]:
        """Go on with the processes that still run on a node that answers again.

        On one that had been given up, what failed before is forgotten.
        """
        forgiven = node in self._gone
        self._lost.discard(node)
        self._gone.pop(node, None)
        results = self._reach(node, reachable=True)
        for replica in self.replicas.values():
            if replica.slot.node != node:
                continue
            if forgiven:
                replica.clear_failures(now=now)
            dead = replica.up and self._process_of(replica.slot.id) not in alive
            why = "died while unreachable"
            results += self.take_out(replica, why, now=now) if dead else self._sync(replica)
        return results

    def _of_node(self, event: NodeEvent, now: Seconds) -> list[Result]:
        match event:
            case NodeLost(node):
                return self.lost(node)
            case NodeBack(node, alive):
                return self.back(node, alive, now=now)
            case NodeGone(node, reason):
                return self.node_gone(node, reason, now=now)
            case _:
                assert_never(event)

    def _reach(self, node: str, *, reachable: bool) -> list[Result]:
        touched = [replica for replica in self.replicas.values() if replica.slot.node == node]
        for replica in touched:
            replica.reachable = reachable
        return [ReplicaChanged(replica) for replica in touched]

    def check(self) -> None:
        for replica in self.replicas.values():
            replica.check()
