"""The life of the trainer's processes: one world of ranks on its slots, started, stopped and moved.

A trainer that dies is started again from the last checkpoint, as its budget allows (``restarts``)
and at most once a minute. It comes back as a new trainer *incarnation*. A trainer that never
started has a configuration error and is not tried again.

**Resize.** For a lasting shift the trainer group itself changes its slots: no step is begun, a
checkpoint is written, every rank stops, and new ones start from it at the same global batch.
Servers go on all the while, and what is to come to the slots that it leaves starts beside the new
ranks. If those do not come up, the old ones are started again where they were, once what came
there meanwhile is gone.

**A lost GPU.** A trainer that died of one goes on without its slot, at the same global batch, if
the node of rank 0, which publishes the weights, has another slot of it; else it is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from libra_cli.core.actions import Save, StartTrainer, StopTrainer, Wake
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import GONE_S
from libra_cli.core.cluster.restarts import RestartBudget, told_of
from libra_cli.core.lifecycle import follow
from libra_cli.core.notices import ReplicaChanged, ResizeRefused, Result
from libra_cli.core.records import NoteRecord
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import LostGpu, Role, Seconds, Slot, SlotId

RESTART_EVERY_S: Seconds = 60.0
DAMAGED = "is damaged"
"""Words in the error of a trainer that cannot start from its
checkpoint (``node.trainer.checkpoint``).
"""

_ROLES = {ReplicaState.FAILED: Role.FAILED, ReplicaState.IDLE: Role.IDLE}


class TrainerState(StrEnum):
    """The states of the trainer as a whole; ``TRANSITIONS`` has the changes allowed."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    STOPPING = "stopping"
    FAILED = "failed"


T = TrainerState

TRANSITIONS: dict[TrainerState, dict[TrainerState, str]] = {
    T.DOWN: {
        T.STARTING: "the run begins, it moves to other slots, those to which it returns are free, "
        "or a minute has passed since it died",
        T.FAILED: "it died too often of late, never started, has lost its GPUs, or waited too long "
        "for a node",
    },
    T.STARTING: {
        T.READY: "every rank is there and has published a version",
        T.STOPPING: "a rank died or was not ready in time, or the run ends",
    },
    T.READY: {
        T.BUSY: "a batch, or a part of one, is claimed",
        T.STOPPING: "a rank died, it moves to other slots, or the run ends",
    },
    T.BUSY: {
        T.READY: "the step is done, or the part accumulated",
        T.STOPPING: "a rank died, the step failed, or the run ends",
    },
    T.STOPPING: {
        T.DOWN: "no process of it is left on any node",
    },
    T.FAILED: {},
}


class TrainerLife:
    """The trainer's state, ranks and slots.

    Methods that may start it take ``path``, the checkpoint to start from; empty: the model.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.state = TrainerState.DOWN
        self.incarnation = 0
        self.detail = ""
        self.replicas = [Replica(slot, since=0.0, role=Role.TRAIN) for slot in slots]
        #: The slots that it is to move to; those it comes from, while it starts on the new ones.
        self.next: list[Slot] = []
        self.previous: list[Replica] = []
        #: Whether it is down until nobody else is on its slots, to which it returns.
        self.needs_room = False
        #: The node of rank 0, for as long as the run lasts.
        self._head = self.replicas[0].slot.node
        #: GPUs that are lost, by node and number.
        self._lost: set[tuple[str, int]] = set()
        #: Nodes that are given up, and since when.
        self._gone: dict[str, Seconds] = {}
        self._ever_started = False
        #: It found its checkpoint damaged, and would again; a run that is resumed takes another.
        self._damaged = False
        #: Whether the run is being wound down, so that it is not started again.
        self._ending = False
        self._restarts = 0
        self._budget = RestartBudget()
        self._started_at: Seconds = 0.0

    def enter(self, state: TrainerState) -> None:
        """Change the state along ``TRANSITIONS``.

        Raises:
            IllegalMove: the table has no such change.
        """
        self.state = follow(TRANSITIONS, self.state, state, "the trainer")

    # -- where it is ----------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether the trainer computes, or is ready to."""
        return self.state in (TrainerState.READY, TrainerState.BUSY)

    @property
    def is_over(self) -> bool:
        """Whether the trainer has stopped, failed, or is being stopped."""
        return self.state in (TrainerState.DOWN, TrainerState.STOPPING, TrainerState.FAILED)

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """The slots of the ranks, in rank order."""
        return tuple([replica.slot.id for replica in self.replicas])

    @property
    def target_slots(self) -> tuple[SlotId, ...]:
        """The slots that it has, or is to have."""
        return tuple([slot.id for slot in self.next]) if self.next else self.slots

    @property
    def proved_slots(self) -> tuple[SlotId, ...]:
        """The slots on which it has worked: those it has, or those a resize has left."""
        return tuple(replica.slot.id for replica in self.previous) or self.slots

    @property
    def resizing(self) -> bool:
        """Whether the trainer is moving to other slots."""
        return bool(self.next or self.previous)

    @property
    def may_resize(self) -> bool:
        """Whether the trainer may be asked to move to other slots now."""
        return self.up and not self.previous

    @property
    def reserved(self) -> list[Slot]:
        """Slots that a rank is on, or may be started on at any moment."""
        return [*self.next, *(replica.slot for replica in self.replicas)]

    # -- coming and going -----------------------------------------------------------------------

    def start(self, path: str, *, now: Seconds) -> list[Result]:
        """Start every rank, from this checkpoint; empty: from the model."""
        self.enter(TrainerState.STARTING)
        self._started_at = now
        self.incarnation += 1
        return [
            StartTrainer(self.incarnation, self.slots, path),
            *self._move(ReplicaState.STARTING, now=now),
        ]

    def started(self, *, now: Seconds) -> list[Result]:
        """Enter READY, since every rank has started; a resize is done with that."""
        self.enter(TrainerState.READY)
        self._ever_started = True
        self._budget.works(now=now)
        self.previous = []
        return self._move(ReplicaState.TRAINING, now=now)

    def worked(self, *, now: Seconds) -> None:
        """Count the time until now as useful work, after which deaths count for less."""
        self._budget.worked(now=now)

    def failed(self, reason: str) -> None:
        """Note whether the checkpoint is damaged: a trainer that finds it so would do so again."""
        self._damaged = self.state is TrainerState.STARTING and DAMAGED in reason

    def stop(self, why: str, *, now: Seconds) -> list[Result]:
        self.enter(TrainerState.STOPPING)
        self.detail = why
        return [
            StopTrainer(self.incarnation, self.slots),
            *self._move(ReplicaState.STOPPING, now=now, why=why),
        ]

    def wind_down(self) -> None:
        """A trainer that ends from now on is not started again."""
        self._ending = True

    def gone(self, path: str, lost: Sequence[LostGpu] = (), *, now: Seconds) -> list[Result]:
        """Start the trainer, which is verified gone, again if the run goes on and its budget
        allows, without the slots whose GPUs are ``lost``.
        """
        if self.state is not TrainerState.STOPPING:
            return []
        self.enter(TrainerState.DOWN)
        actions = self._move(ReplicaState.IDLE, now=now, why=self.detail)
        if self._ending:
            return actions
        if lost:
            return [*actions, *self._go_on_without(lost, path, now)]
        if any(slot.node in self._gone for slot in self.next):
            self.next = []
            actions.append(ResizeRefused(self.detail))
        if self.next:
            return [*actions, *self._start_on(self.next, self.replicas, path, now)]
        if self.previous:
            old = [replica.slot for replica in self.previous]
            why = f"the resized trainer did not start: {self.detail}"
            return [*actions, *self._return_to(old, now), ResizeRefused(why)]
        wait_s = self._budget.wait_s()
        if not self._ever_started or self._damaged or wait_s is None:
            return [*actions, *self._give_up(now)]
        self._restarts += 1
        return [*actions, self._wake(wait_s, now)]

    def _go_on_without(self, lost: Sequence[LostGpu], path: str, now: Seconds) -> list[Result]:
        """Start on the slots of the trainer that have lost nothing, rank 0 on its node."""
        self._lost |= {(gpu.node, gpu.number) for gpu in lost}
        self.detail = told_of(lost)
        had = self.previous or self.replicas
        left = [one.slot for one in had if not self.has_lost(one.slot)]
        left.sort(key=lambda slot: slot.node != self._head)
        if not left or left[0].node != self._head:
            return self._give_up(now)
        told: list[Result] = []
        for one in self.replicas:
            if self.has_lost(one.slot):
                one.move(ReplicaState.FAILED, now=now, why=self.detail)
                one.role = Role.FAILED
                text = f"{one.slot.id}: {self.detail}; the trainer goes on without that slot"
                told += [Save(NoteRecord("slot", one.slot.id, now, text)), ReplicaChanged(one)]
        if self.previous:
            return [*told, *self._return_to(left, now), ResizeRefused(self.detail)]
        return [*told, *self._start_on(left, [], path, now), ResizeRefused(self.detail)]

    def has_lost(self, slot: Slot) -> bool:
        """Whether a trainer on the slot died because a GPU of it is lost."""
        return any((slot.node, gpu) in self._lost for gpu in slot.gpus)

    def _wake(self, wait_s: Seconds, now: Seconds) -> Wake:
        rest_s = max(wait_s, self._started_at + RESTART_EVERY_S - now)
        return Wake(TimerKey(TimerOwner.TRAINER).name, rest_s)

    def _give_up(self, now: Seconds) -> list[Result]:
        self.enter(TrainerState.FAILED)
        return self._move(ReplicaState.FAILED, now=now, why=self.detail)

    def _start_on(
        self, slots: list[Slot], previous: list[Replica], path: str, now: Seconds
    ) -> list[Result]:
        """Start on other slots; to the ``previous`` ones it returns if it does not work there."""
        self.previous, self.next = previous, []
        self.replicas = [Replica(slot, since=now, role=Role.TRAIN) for slot in slots]
        return [] if self.waits_for else self.start(path, now=now)

    def _return_to(self, slots: list[Slot], now: Seconds) -> list[Result]:
        """Have it start on slots that it had left, when others have left them (``in_room``)."""
        self.previous, self.next = [], []
        self.replicas = [Replica(slot, since=now, role=Role.TRAIN) for slot in slots]
        self.needs_room = True
        return [ReplicaChanged(replica) for replica in self.replicas]

    def in_room(self, path: str, *, now: Seconds) -> list[Result]:
        """Start the trainer on the slots to which it returns, of which nobody else is on any."""
        self.needs_room = False
        return self.restart(path, now=now)

    def restart(self, path: str, *, now: Seconds) -> list[Result]:
        """Start the trainer after its rest, unless it waits for a node that is given up, or for
        others to leave its slots.
        """
        waits = self.needs_room or self.waits_for
        may = self.state is TrainerState.DOWN and not waits
        return self.start(path, now=now) if may else []

    # -- nodes ----------------------------------------------------------------------------------

    @property
    def waits_for(self) -> list[str]:
        """Nodes of its ranks that are given up, in rank order."""
        nodes = dict.fromkeys(replica.slot.node for replica in self.replicas)
        return [node for node in nodes if node in self._gone]

    def node_gone(self, node: str, *, now: Seconds) -> bool:
        """Note that a node is given up; returns whether a rank ran
        there, and the trainer is dead with it.
        """
        self._gone[node] = now
        return node in self.waits_for

    def back(self, node: str, *, now: Seconds) -> list[Result]:
        """Note that a node answers again, and start a trainer that waited only for it."""
        waited = node in self.waits_for
        if self._gone.pop(node, None) is not None:  # it was rebooted, or as good as that
            self._lost = {gpu for gpu in self._lost if gpu[0] != node}
        if not waited:
            return []
        self._budget.refill()
        return [self._wake(0.0, now)]

    def node_overdue(self, node: str, *, now: Seconds) -> list[Result]:
        """A node that was given up has had the time to come back."""
        overdue = node in self.waits_for and now - self._gone[node] >= GONE_S
        if not overdue or self.state is not TrainerState.DOWN:
            return []
        self.detail = f"{node} has not come back ({self.detail})"
        return self._give_up(now)

    def _move(self, to: ReplicaState, *, now: Seconds, why: str = "") -> list[Result]:
        for replica in self.replicas:
            replica.move(to, now=now, why=why)
            replica.incarnation = self.incarnation
            replica.restarts = self._restarts
            replica.role = _ROLES.get(to, Role.TRAIN)
        return [ReplicaChanged(replica) for replica in self.replicas]
