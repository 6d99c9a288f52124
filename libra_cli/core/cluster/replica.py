"""A replica: the process of one role on one slot, and the table of its life.

Rules for this file: everything that may change a replica's state lives here; a change not
in ``TRANSITIONS`` is a bug and raises ``IllegalMove`` without changing anything; the text of a
change says what in the world causes it.

An **incarnation** is the number of the process's life. It grows whenever a process is taken out or
put to sleep, so that whatever it still has to say of before can be recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from json import dumps

from libra_cli.core.cluster.restarts import RestartBudget
from libra_cli.core.events import PublishedVersion
from libra_cli.core.lifecycle import follow
from libra_cli.core.records import SlotRecord
from libra_cli.core.types import Bucket, GroupId, LostGpu, Role, Seconds, Slot, WeightVersion


class ReplicaState(StrEnum):
    """The states of a replica's process; ``TRANSITIONS`` has the changes allowed."""

    IDLE = "idle"
    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    TRAINING = "training"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    STOPPING = "stopping"
    FAILED = "failed"


S = ReplicaState

TRANSITIONS: dict[ReplicaState, dict[ReplicaState, str]] = {
    S.IDLE: {
        S.STARTING: "the plan gives it a server, a gradient worker, a model or a trainer rank",
        S.FAILED: "it has died too often of late, or never worked, or a GPU of it is lost",
    },
    S.STARTING: {
        S.JOINING: "the server has generated a token, or the worker's world is whole",
        S.SERVING: "the server of a frozen model is healthy",
        S.TRAINING: "every rank is there and the world has the asked size",
        S.STOPPING: "the process ended, or was not ready in time, or the run ends",
    },
    S.JOINING: {
        S.SERVING: "the server holds the current version, proved by checksums and on the probe",
        S.TRAINING: "the gradient worker has the current version, proved on the probe",
        S.STOPPING: "the version could not be loaded or proved, twice, or the run ends",
    },
    S.SERVING: {
        S.DRAINING: "a new plan has no server on it: turns under way may end, none begins",
        S.STOPPING: "the server died, computes with wrong weights, or the run ends",
    },
    S.DRAINING: {
        S.FALLING_ASLEEP: "its last turn has ended, and its process may stay (rollout.sleep)",
        S.STOPPING: "its last turn or share has ended or is given up, or it died, or the run ends",
    },
    S.TRAINING: {
        S.DRAINING: "a new plan has no gradient worker on it: its share may end, none begins",
        S.STOPPING: "a rank died, a step failed, the trainer is resized, or the run ends",
    },
    S.FALLING_ASLEEP: {
        S.ASLEEP: "it has given back its weights and KV cache",
        S.STOPPING: "it could not, or died, or the run ends",
    },
    S.ASLEEP: {
        S.WAKING: "a plan has a server of its shape there again, and its GPUs are free",
        S.STOPPING: "it died, another server is to use its GPUs, or the run ends",
    },
    S.WAKING: {
        S.JOINING: "it has room for weights and KV cache again",
        S.STOPPING: "it could not take it, or died, or the run ends",
    },
    S.STOPPING: {
        S.IDLE: "no process with its marker is left on the node",
    },
    S.FAILED: {
        S.IDLE: "a new plan has something on it, its node is back, or half an hour has passed",
    },
}


@dataclass(slots=True)
class Replica:
    """One role of one slot: its state and what is known of the process.

    A slot that changes its role may have a replica of each for a while.
    """

    slot: Slot
    since: Seconds
    state: ReplicaState = S.IDLE
    role: Role = Role.IDLE
    incarnation: int = 0
    bucket: Bucket | None = None
    #: The frozen model that it serves; empty for every other process.
    model: str = ""
    #: The version the server has proved to compute with; None before the first proof.
    verified: PublishedVersion | None = None
    #: The version being loaded; None when no sync is under way.
    syncing: PublishedVersion | None = None
    #: Versions that it may have generated with, whose proof broke off.
    unproved: set[WeightVersion] = field(default_factory=set)
    #: A process that never worked has a wrong configuration: it is not started again.
    has_worked: bool = False
    reachable: bool = True
    #: Something failed, and it has not answered since: nothing is sent to it.
    suspect: bool = False
    #: Its process has given its memory back, in sleep, until it wakes or is gone.
    gave_back: bool = False
    #: It has died and waits before it is started again.
    resting: bool = False
    #: Starts after a death, over all of the run; and which deaths count.
    restarts: int = 0
    budget: RestartBudget = field(default_factory=RestartBudget)
    #: GPUs of the slot that its node lacked when its process had failed and was gone.
    lost: tuple[LostGpu, ...] = ()
    #: Times that something failed since anything succeeded.
    failures: int = 0
    #: Groups whose requests broke off since any was answered.
    broken: set[GroupId] = field(default_factory=set)
    #: Syncs that this process answered and that proved nothing, since it proved anything.
    failed_syncs: int = 0
    #: Syncs that broke off without an answer, since it proved anything.
    broken_syncs: int = 0
    #: It started, and then proved nothing: that is worth one restart though it has never worked.
    restarts_unproved: bool = False
    running: int = 0
    running_since: Seconds = 0.0
    #: When it had the version that it then proved.
    loaded_at: Seconds = 0.0
    busy_s: Seconds = 0.0
    #: Requests inside it, summed over time.
    request_s: Seconds = 0.0
    serving_s: Seconds = 0.0
    detail: str = ""
    engine: str = ""
    """What of its engine a server says that runs."""
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        past = "; ".join(self.story)
        return f"slot {self.slot.id} ({self.state} since {self.since:.1f} s; before: {past or '-'})"

    def move(self, to: ReplicaState, *, now: Seconds, why: str = "") -> None:
        """Change its state along the table.

        Raises:
            IllegalMove: the table has no such change; nothing was changed.
        """
        before = self.state
        follow(TRANSITIONS, before, to, self)
        if self.serving:
            self.count(0, now=now)
            self.serving_s += now - self.since
        self.story = [*self.story[-5:], f"{before} -> {to} at {now:.1f} s {why}".rstrip()]
        self.state, self.since, self.detail = to, now, why
        self.gave_back = to is S.ASLEEP or (self.gave_back and to is S.STOPPING)
        if to in (S.SERVING, S.TRAINING):
            self.budget.works(now=now)
        elif before in (S.SERVING, S.TRAINING):
            self.budget.worked(now=now)

    def reset(self, *, now: Seconds) -> None:
        """Leave FAILED for IDLE and forget the failures, since a new plan wants a process there."""
        self.move(S.IDLE, now=now)
        self.role, self.has_worked, self.restarts_unproved = Role.IDLE, False, False
        self.budget.refill()

    def clear_failures(self, *, now: Seconds) -> None:
        """Forget every failure, since the node came back."""
        if self.state is S.FAILED:
            self.reset(now=now)
        self.resting = False
        self.budget.refill()

    def count(self, change: int, *, now: Seconds) -> None:
        """Add to the number of our requests inside the server, and to its busy time."""
        if self.running > 0:
            self.busy_s += now - self.running_since
            self.request_s += self.running * (now - self.running_since)
        self.running += change
        self.running_since = now

    def retire(self) -> None:
        """Make every answer still under way an old one."""
        self.incarnation += 1
        self.running = self.failures = self.failed_syncs = self.broken_syncs = 0
        self.verified = self.syncing = None
        self.suspect = False
        self.unproved.clear()
        self.broken.clear()

    @property
    def serving(self) -> bool:
        """Whether requests may be running on the server."""
        return self.role is Role.ROLLOUT and self.state in (S.SERVING, S.DRAINING)

    @property
    def up(self) -> bool:
        return self.state not in (S.IDLE, S.FAILED)

    @property
    def holds(self) -> bool:
        """Whether its process may use the slot's devices."""
        return self.up and not self.gave_back

    @property
    def startable(self) -> bool:
        """Whether a process may be started here, as far as the slot itself is concerned."""
        return self.state is S.IDLE and self.reachable and not self.resting

    @property
    def routable(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.state is S.SERVING and self.reachable and not self.suspect

    def check(self) -> None:
        """Raise AssertionError if requests are counted wrongly, or an unverified server serves."""
        assert self.running >= 0, f"{self.slot.id} counts {self.running} requests"
        proved = self.verified is not None or self.model
        assert self.state is not S.SERVING or proved, self.slot.id
        assert self.running == 0 or self.state in (S.SERVING, S.DRAINING), self.slot.id


_SHOWN = {
    S.SERVING: 4,
    S.TRAINING: 4,
    S.DRAINING: 4,
    S.FALLING_ASLEEP: 3,
    S.STOPPING: 3,
    S.WAKING: 2,
    S.JOINING: 2,
    S.STARTING: 2,
    S.FAILED: 1,
    S.ASLEEP: 1,
    S.IDLE: 0,
}


def shown(replicas: Iterable[Replica]) -> Replica:
    """Return the replica of a slot that works, or is nearest to working."""
    return max(replicas, key=lambda replica: (_SHOWN[replica.state], replica.since))


def slot_record(replica: Replica, *, now: Seconds, waiting: int) -> SlotRecord:
    """Return the slot's row; ``now`` brings its serving time up to date."""
    serving = now - replica.since if replica.serving else 0.0
    return SlotRecord(
        slot=replica.slot.id,
        node=replica.slot.node,
        gpus_json=dumps(replica.slot.gpus),
        pool=replica.slot.pool,
        role=replica.role,
        state=replica.state if replica.reachable else "unreachable",
        since=replica.since,
        incarnation=replica.incarnation,
        bucket=replica.bucket.name if replica.bucket else replica.model,
        version=replica.verified.version.step if replica.verified else None,
        verified=replica.verified is not None,
        running=replica.running,
        waiting=waiting,
        busy_s=replica.busy_s,
        serving_s=replica.serving_s + serving,
        restarts=replica.restarts,
        detail=replica.detail,
        engine=replica.engine,
    )
