"""The elastic pool: brings slots to where the plan has them, while everyone else keeps working.

    wanted of a slot        what happens, one small step at a time, whenever something has changed
    no server any more      drain it; once its last turn has ended, stop it
    no worker any more      its share may end; then stop it
    a server, a worker      start it when no process is left on its GPUs, or beside, where there is
                            room
    another core            free the slots that join it, then checkpoint, stop, start again there

Nothing here remembers a position in a script: each time, what is wanted is compared with what is,
so a death, a late reply or a new plan in the middle of a move needs no case of its own. What is
wanted is ``wanted``; ``following`` says which phase a slot is in, by the table ``move.LIFECYCLE``.

Where there is room the next process starts while the old one works, and the old one is drained only
when the next has proved that it computes with the current version.

A slot that drains is not routed to; what waits for it chooses again at once. Turns may end within
``GRACE_S``, then they are aborted and go on elsewhere from the tokens they have. Guarantee: nobody
else waits for a move; at no time two servers hold one GPU; a move that fails gives the slot back.
Limit: a turn whose server does not even answer an abort within ``DRAIN_S`` is generated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra_cli.core.actions import Action, Save, Wake
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.replica import Replica, ReplicaState, slot_record
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.cluster.trainer import TrainerGroup
from libra_cli.core.reconcile.desired_state import DesiredState
from libra_cli.core.reconcile.migration import SlotMigration
from libra_cli.core.reconcile.migrations import WORKING, MigrationTracker
from libra_cli.core.records import SlotRecord
from libra_cli.core.types import Plan, Role, Seconds, Slot, SlotId

GRACE_S: Seconds = 10.0
DRAIN_S: Seconds = 120.0
TIMER = "drain "
ABORT, OUT = "abort", "out"
WHY = "the plan has something else on it"
_RANK = {
    ReplicaState.SERVING: 4,
    ReplicaState.TRAINING: 4,
    ReplicaState.DRAINING: 4,
    ReplicaState.STOPPING: 3,
    ReplicaState.JOINING: 2,
    ReplicaState.STARTING: 2,
    ReplicaState.FAILED: 1,
}


class Reconciler:
    """What the plan wants of every slot, and how far it is. Methods return actions."""

    def __init__(
        self, servers: RolloutServers, workers: GradientWorkers, training: TrainerGroup, plan: Plan
    ) -> None:
        self._servers = servers
        self._workers = workers
        self._training = training
        self._wanted = DesiredState(plan)
        self._following = MigrationTracker(self._wanted, servers, workers, training)
        self._draining: set[SlotId] = set()

    @property
    def moves(self) -> dict[SlotId, SlotMigration]:
        """Under way, by slot."""
        return self._following.moves

    def learn(self, slots: Iterable[Slot]) -> None:
        """These slots exist."""
        self._wanted.learn(slots)

    def wants_back(self, status: Replica) -> bool:
        """Whether the process that has just ended there should not have: the plan has it."""
        if status.detail == WHY:
            return False
        if status.bucket is None:
            return status.slot.id in self._wanted.gradient
        return self._wanted.servers.get(status.slot.id) == status.bucket

    def differs(self) -> bool:
        """Whether a failure has changed what is wanted since this was last asked."""
        differs, self._wanted.differs = self._wanted.differs, False
        return differs

    def plan(self, reasons: tuple[str, ...]) -> Plan:
        """What is wanted now; a move that failed has changed it."""
        return self._wanted.plan(reasons)

    def role_of(self, slot: SlotId) -> Role:
        """What the slot is to do."""
        return self._wanted.role_of(slot)

    # -- another plan ---------------------------------------------------------------------------

    def adopt(self, plan: Plan, number: int, *, now: Seconds) -> list[Action]:
        """Begin to move to another plan. A bucket that only means other lengths moves nothing."""
        wanted = self._wanted
        before = {slot: (wanted.role_of(slot), wanted.servers.get(slot)) for slot in wanted.slots}
        wanted.adopt(plan)
        actions: list[Action] = []
        for slot, bucket in wanted.servers.items():
            actions += self._servers.expect(wanted.slots[slot], bucket, now=now)
        for slot in sorted(wanted.gradient):
            self._workers.expect(wanted.slots[slot], now=now)
        for slot, (role, bucket_before) in before.items():
            if role is not wanted.role_of(slot) or not self._keeps_shape(slot):
                actions += self._following.begin(slot, role, bucket_before, number, now=now)
        return actions

    def _keeps_shape(self, slot: SlotId) -> bool:
        status, wanted = self._servers.slots.get(slot), self._wanted.servers.get(slot)
        return status is None or wanted is None or status.bucket in (None, wanted)

    # -- one step, whenever something has changed -----------------------------------------------

    def settle(self, *, now: Seconds) -> list[Action]:
        """Whatever can be done now for the plan is done."""
        actions = self._drained(now)
        parts = (self._servers, self._workers, self._training, self._following)
        settled = self._training.aim == self._wanted.core and not self.moves
        if settled and not any(part.stirred for part in parts):
            return actions
        for part in parts:
            part.stirred = False
        actions += self._stop_unwanted(now)
        actions += self._start_free(now)
        actions += self._resize(now)
        actions += self._following.look(now=now)
        self._label_idle()
        return actions

    def _label_idle(self) -> None:
        """A slot without a process is still a server's, if one is to come."""
        for status in self._servers.slots.values():
            if status.state is ReplicaState.IDLE:
                wanted = status.slot.id in self._wanted.servers
                status.role = Role.ROLLOUT if wanted else Role.IDLE

    def _stop_unwanted(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for status in self._servers.slots.values():
            wrong = status.up and self._wanted.servers.get(status.slot.id) != status.bucket
            kept = self._waits_for(status.slot.id, self._workers.slots) or self._is_last(status)
            if wrong and not kept:
                actions += self._drain(status, now)
        for status in self._workers.slots.values():
            wrong = status.up and status.slot.id not in self._wanted.gradient
            if wrong and not self._waits_for(status.slot.id, self._servers.slots):
                actions += self._workers.leave(status, WHY, now=now)
        return actions

    def _is_last(self, status: Replica) -> bool:
        """Whether nobody else serves yet, and another server can come up without its GPUs."""
        if status.state is not ReplicaState.SERVING:
            return False
        others = (other for other in self._servers.slots.values() if other is not status)
        if any(other.state is ReplicaState.SERVING and other.reachable for other in others):
            return False
        mine = _gpus(status.slot)
        coming = self._wanted.servers.keys() - set(self._training.core)
        return any(mine.isdisjoint(_gpus(self._wanted.slots[slot])) for slot in coming)

    def _waits_for(self, slot: SlotId, others: dict[SlotId, Replica]) -> bool:
        """Whether the old process works on until the next one, beside it, is ready."""
        if not self._following.has_room(slot):
            return False
        status = others.get(slot)
        return status is None or status.state not in WORKING

    def _drain(self, status: Replica, now: Seconds) -> list[Action]:
        if status.state in (ReplicaState.DRAINING, ReplicaState.STOPPING):
            return []
        if status.state is not ReplicaState.SERVING:
            return self._servers.take_out(status, WHY, now=now)
        status.move(ReplicaState.DRAINING, now=now, why=WHY)
        self._draining.add(status.slot.id)
        timer = f"{TIMER}{status.slot.id} {status.incarnation}"
        times = [Wake(f"{timer} {ABORT}", GRACE_S), Wake(f"{timer} {OUT}", DRAIN_S)]
        return [self._servers.record(status, now), *times]

    def _drained(self, now: Seconds) -> list[Action]:
        """Stop every draining server whose last turn has ended."""
        actions: list[Action] = []
        for slot in sorted(self._draining) if self._draining else ():
            status = self._servers.slots[slot]
            if status.state is not ReplicaState.DRAINING or not status.running:
                self._draining.discard(slot)
            if status.state is ReplicaState.DRAINING and not status.running:
                actions += self._servers.take_out(status, WHY, now=now)
        return actions

    def overdue(self, timer: str, *, now: Seconds) -> tuple[SlotId | None, list[Action]]:
        """A draining server's time is up: the slot whose turns are to be aborted, or it is out."""
        slot, incarnation, what = timer.removeprefix(TIMER).rsplit(" ", 2)
        status = self._servers.current(slot, int(incarnation))
        if status is None or status.state is not ReplicaState.DRAINING:
            return None, []
        if what == ABORT:
            return slot, []
        return None, self._servers.take_out(status, WHY, now=now)

    def _start_free(self, now: Seconds) -> list[Action]:
        """Start what the plan has on slots whose GPUs no process holds, or that have room."""
        actions: list[Action] = []
        for slot, bucket in self._wanted.servers.items():
            status = self._servers.slots[slot]
            if status.state is ReplicaState.IDLE and self._is_free(status.slot):
                actions += self._servers.start(status, bucket, now=now)
        for slot_id in sorted(self._wanted.gradient):
            status = self._workers.of(self._wanted.slots[slot_id], now=now)
            if status.state is ReplicaState.IDLE and self._is_free(status.slot):
                actions += self._workers.start(status, now=now)
        return actions

    def _is_free(self, slot: Slot) -> bool:
        beside = self._following.has_room(slot.id)
        wanted = _gpus(slot)
        # A core that is down, or is being replaced, may come back: its slots stay free for it.
        held = [
            *self._training.reserved,
            *(
                status.slot
                for status in self._all()
                if status.up and not (beside and status.slot.id == slot.id)
            ),
        ]
        return all(wanted.isdisjoint(_gpus(other)) for other in held)

    def _all(self) -> Iterator[Replica]:
        yield from self._servers.slots.values()
        yield from self._workers.slots.values()
        yield from self._training.slots

    def _resize(self, now: Seconds) -> list[Action]:
        """Ask for another core once the slots that join it are free."""
        if self._training.refused:
            self._training.refused = False
            why = f"the resized core did not start: {self._training.detail}"
            self._wanted.refuse_core(self._training.core, why)
        if not self._training.may_resize or self._training.aim == self._wanted.core:
            return []
        if self._training.core == self._wanted.core:
            return self._training.resize([], now=now)
        core = [self._wanted.slots[slot] for slot in self._wanted.core]
        joining = [slot for slot in core if slot.id not in self._training.core]
        others = [*self._servers.slots.values(), *self._workers.slots.values()]
        held = {gpu for status in others if status.up for gpu in _gpus(status.slot)}
        if any(not held.isdisjoint(_gpus(slot)) for slot in joining):
            return self._training.resize([], now=now)
        return self._training.resize(core, now=now)

    def end(self, why: str, *, now: Seconds) -> list[Action]:
        """The run ends: so do the moves under way."""
        return self._following.end(why, now=now)

    def deadline(self, timer: str, *, now: Seconds) -> list[Action]:
        """A phase of a move has taken as long as it may."""
        return self._following.deadline(timer, now=now)

    # -- what is told ---------------------------------------------------------------------------

    def told(self, actions: list[Action], *, now: Seconds) -> list[Action]:
        """With one row a slot: that of the process that works, where there are two."""
        return [self._told(action, now) for action in actions]

    def _told(self, action: Action, now: Seconds) -> Action:
        if not isinstance(action, Save) or not isinstance(action.record, SlotRecord):
            return action
        slot = action.record.slot
        here = [status for status in self._all() if status.slot.id == slot]
        if len(here) < 2:
            return action
        shown = max(here, key=lambda status: (_RANK.get(status.state, 0), status.since))
        return Save(slot_record(shown, now=now, waiting=action.record.waiting))

    def check(self) -> None:
        """Invariants that hold between any two events."""
        self._following.check()
        self._wanted.check()
        self._check_gpus()

    def _check_gpus(self) -> None:
        """No two processes hold one GPU; without GPUs two may meet in a move."""
        held: dict[tuple[str, int | str], str] = {}
        for status in self._all():
            for gpu in _gpus(status.slot) if status.up and status.slot.gpus else ():
                assert gpu not in held, f"{status.slot.id} and {held[gpu]} hold {gpu}"
                held[gpu] = status.slot.id


def _gpus(slot: Slot) -> set[tuple[str, int | str]]:
    """What no two processes may share: GPUs, or the slot itself on a host without any."""
    return {(slot.node, gpu) for gpu in slot.gpus} or {(slot.node, slot.id)}
