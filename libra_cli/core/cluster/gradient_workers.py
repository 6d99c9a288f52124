"""The gradient workers: whole replicas that compute a share of a step beside the trainer group.

``replica_set`` says how they come, are kept at the newest version, and go. A worker computes a
share only with the very version the trainer group holds. The next step may begin while it is still
loading: it is dealt its share all the same, and takes it when it is ready; one that lies further
back has no share in that step. The trainer group computes the share of a worker that dies, is
silent or answers for another step, so nothing here can hold up a step; a worker whose shares went
unused ``MAX_MISSED`` times running is taken out, and so is one that a version did not reach
``MAX_UNREACHED`` times running: once is no fault of its own, since a trainer that dies takes its
versions with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, assert_never

from libra_cli.core.actions import (
    Action,
    BatchPartition,
    StartWorker,
    StopWorker,
    SyncWorker,
    TrainSample,
    WorkerAction,
)
from libra_cli.core.cluster.partition import Speeds, deal_shares, of_first_update
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import ReplicaSet
from libra_cli.core.events import (
    NodeEvent,
    PublishedVersion,
    ShareDone,
    WorkerEvent,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
    WorkerSynced,
    WorkerSyncFailed,
)
from libra_cli.core.launch.process import worker_of
from libra_cli.core.notices import ReplicaChanged, Result, StepOver
from libra_cli.core.types import Role, Seconds, SlotId

MAX_MISSED = 3
MAX_UNREACHED = 3


class GradientWorkers(ReplicaSet):
    """The replicas of all slots that are, or were, gradient workers.

    ``trainer_gpus``: of the trainer group at first; ``gradient_ratio``: bytes of the gradients that
    a worker sends, over those of a version; ``shares_steps``: whether a step can be shared with
    workers at all; ``whole_groups``: whether all of a group goes to one of them; ``minibatches``:
    updates of a pass, of which workers share the first of a step, dealt by the run's ``seed``.
    """

    events: ClassVar[Any] = WorkerEvent | NodeEvent
    actions: ClassVar[Any] = WorkerAction
    role = Role.GRADIENT
    working = ReplicaState.TRAINING

    def __init__(
        self,
        trainer_gpus: int,
        gradient_ratio: float = 1.0,
        *,
        shares_steps: bool = True,
        whole_groups: bool = False,
        minibatches: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._minibatches, self._seed = minibatches, seed
        self._whole_groups = whole_groups
        self._shares_steps = shares_steps
        self._gradient_ratio = gradient_ratio
        self._speeds = Speeds(trainer_gpus)
        #: Slots that have a share of the step under way.
        self._sharing: set[SlotId] = set()
        #: Slots whose share has been used since they joined; shares in a row that were not.
        self.used: set[SlotId] = set()
        self._missed: dict[SlotId, int] = {}
        #: Why slots that are ready had no share of the last step.
        self._unpaid: dict[SlotId, str] = {}

    def _start_action(self, replica: Replica) -> Action:
        return StartWorker(replica.slot.id, replica.incarnation)

    def _sync_action(self, replica: Replica, published: PublishedVersion) -> Action:
        return SyncWorker(replica.slot.id, replica.incarnation, published)

    def _stop_action(self, replica: Replica) -> Action:
        return StopWorker(replica.slot.id, replica.incarnation)

    def _process_of(self, slot: SlotId) -> str:
        return worker_of(slot)

    def _taken_out(self, slot: SlotId, *, died: bool) -> list[Result]:
        self._sharing.discard(slot)
        self.used.discard(slot)
        self._missed.pop(slot, None)
        self._unpaid.pop(slot, None)
        return []

    def _take_in(self, event: WorkerEvent, now: Seconds) -> list[Result]:
        match event:
            case WorkerSynced():
                return self.synced(event, now=now)
            case WorkerSyncFailed():
                return self.sync_failed(event, now=now)
            case WorkerStarted():
                return self.started(event, now=now)
            case WorkerFailed():
                return self.failed(event, now=now)
            case WorkerStopped():
                return self.gone(event)
            case _:
                assert_never(event)

    def leave(self, replica: Replica, why: str, *, now: Seconds) -> list[Result]:
        """Give the worker no more shares; the one it has may end."""
        if replica.state is ReplicaState.DRAINING:
            return []
        if replica.state is ReplicaState.TRAINING and replica.slot.id in self._sharing:
            replica.move(ReplicaState.DRAINING, now=now, why=why)
            return [ReplicaChanged(replica)]
        return self.take_out(replica, why, now=now)

    # -- versions -------------------------------------------------------------------------------

    def synced(self, event: WorkerSynced, *, now: Seconds) -> list[Result]:
        """Let a worker that has proved a version have shares from the next step on."""
        if self.current(event.slot, event.incarnation) is not None:
            self._speeds.would_fetch(event.slot, event.pull_s * self._gradient_ratio)
        return self._proved(event, loaded_at=event.loaded_at, now=now)

    def sync_failed(self, event: WorkerSyncFailed, *, now: Seconds) -> list[Result]:
        """Give the worker no share until it has proved a newer version; take
        it out after ``MAX_UNREACHED`` failures.
        """
        replica = self._not_proved(event)
        if replica is None or self.latest is None:  # it is gone
            return []
        replica.failures += 1
        if replica.failures >= MAX_UNREACHED:
            return self.take_out(replica, event.reason, now=now)
        return self._sync(replica) if self.latest != event.published else []

    # -- shares ---------------------------------------------------------------------------------

    def shares(
        self, samples: Sequence[TrainSample], trainer_gpus: int, step: int
    ) -> tuple[BatchPartition, ...]:
        """Return the share of a step's first update for each worker that is ready; the trainer
        computes the rest, on ``trainer_gpus`` GPUs.
        """
        self._speeds.resized(trainer_gpus)
        ready = [replica for replica in self.replicas.values() if self._is_ready(replica)]
        if not self._shares_steps:
            why = "no share: steps of this recipe cannot be shared"
            self._unpaid = {one.slot.id: why for one in ready}
            return ()
        seed = (self._seed, step)
        samples = of_first_update(samples, minibatches=self._minibatches, seed=seed)
        shares = deal_shares(samples, ready, self._speeds, whole_groups=self._whole_groups)
        self._sharing = {share.slot for share in shares}
        what = "all of the step" if self._minibatches == 1 else "all of the first update"
        alone_s = sum(len(one.tokens.token_ids) for one in samples) / self._speeds.of_trainer()
        transfers = {one.slot.id: self._speeds.transfer_s(one.slot.id) for one in ready}
        self._unpaid = {
            slot: f"no share: its gradients take {transfer_s:.1f} s to fetch, and the trainer "
            f"computes {what} in {alone_s:.1f} s"
            for slot, transfer_s in transfers.items()
            if slot not in self._sharing and transfer_s >= alone_s
        }
        return shares

    @property
    def would_share(self) -> bool:
        """Whether a step that began now would have shares of workers."""
        ready = any(self._is_ready(replica) for replica in self.replicas.values())
        return ready and self._shares_steps

    def _is_ready(self, replica: Replica) -> bool:
        holds = self.latest is not None and self.latest in (replica.verified, replica.syncing)
        return replica.state is ReplicaState.TRAINING and replica.reachable and holds

    def step_over(self, step: StepOver, *, now: Seconds) -> list[Result]:
        """Learn speeds from the shares of a step that ended, take out the workers that are leaving,
        and sync the others.
        """
        results: list[Result] = []
        self._speeds.trainer(step.tokens, step.seconds)
        self._sharing.clear()
        for share in step.shares:
            replica = self.current(share.slot, share.incarnation)
            if replica is not None:
                results += self._judge(replica, share, step.seconds, now)
        for replica in self.replicas.values():
            if replica.state is ReplicaState.DRAINING:
                results += self.take_out(replica, replica.detail, now=now)
            elif replica.state is ReplicaState.TRAINING:
                results += self._tell(replica)
        return results

    def _tell(self, replica: Replica) -> list[Result]:
        """Update the detail of a worker's row: why it had no share, or nothing if it had one."""
        why = self._unpaid.get(replica.slot.id, "")
        if why.partition(":")[0] == replica.detail.partition(":")[0]:
            return []
        replica.detail = why
        return [ReplicaChanged(replica)]

    def _judge(
        self, replica: Replica, share: ShareDone, own_s: Seconds, now: Seconds
    ) -> list[Result]:
        slot = share.slot
        if share.seconds:
            self._speeds.worker(slot, share.tokens, share.seconds)
        if share.used:
            self._speeds.fetched(slot, share.transfer_s)
            busy_s = (share.seconds or own_s) + share.transfer_s
            self._speeds.took(slot, busy_s, own_s, share.waited_s)
            self.used.add(slot)
            self._missed[slot] = 0
            return []
        self._missed[slot] = self._missed.get(slot, 0) + 1
        if self._missed[slot] < MAX_MISSED:
            return []
        why = f"{MAX_MISSED} shares in a row were of no use: {share.reason}"
        return self.take_out(replica, why, now=now)

    def check(self) -> None:
        """Raise AssertionError if a worker with a share of the step neither trains nor drains."""
        super().check()
        for slot in self._sharing:
            states = (ReplicaState.TRAINING, ReplicaState.DRAINING)
            assert self.replicas[slot].state in states, f"{slot} has a share and is not there"
