"""Brings slots to where the plan has them, while everyone else keeps working.

    wanted of a slot        what happens, one small step at a time, whenever something has changed
    no server any more      drain it; once its last turn has ended, stop it, or have it sleep
    no worker any more      its share may end; then stop it
    a server, a worker      start it, or wake the server that sleeps there, when no process uses
                            its GPUs, or beside the old one on a host without GPUs
    another trainer group   free the slots that join it, then checkpoint, stop, start again there;
                            what comes to those that it leaves starts beside it

Nothing here remembers a position in a script: each time, what is wanted is compared with what is,
so a death, a late reply or a new plan in the middle of a move needs no case of its own. What is
wanted is ``DesiredState``; ``MigrationTracker`` says which phase a slot is in, by ``LIFECYCLE``.

Where two processes fit, the next one starts while the old one works, and the old one is drained
only when the next has proved that it computes with the current version.

A slot that drains is not routed to; what waits for it chooses again at once. Turns may end within
``GRACE_S``, then they are aborted and go on elsewhere from the tokens they have. Guarantee: nobody
else waits for a move; at no time two servers hold one GPU; a move that fails gives the slot back.
Limit: a turn whose server does not even answer an abort within ``DRAIN_S`` is generated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from libra_cli.core.actions import Wake
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.model_servers import ModelServers
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import ReplicaSet
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.cluster.trainer import TrainerGroup
from libra_cli.core.notices import PlanMended, Result, TurnsBroken
from libra_cli.core.reconcile.desired_state import DesiredState, Served
from libra_cli.core.reconcile.migration import SlotMigration
from libra_cli.core.reconcile.migrations import WORKING, MigrationTracker
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Bucket, Plan, Role, Seconds, Slot, SlotId, devices_of

GRACE_S: Seconds = 10.0
DRAIN_S: Seconds = 120.0
ABORT, OUT = "abort", "out"
WHY = "the plan has something else on it"
_LEAVING = (ReplicaState.DRAINING, ReplicaState.FALLING_ASLEEP, ReplicaState.STOPPING)


class Reconciler:
    """Brings each slot to the role that the plan has for it. Methods return actions and notices."""

    def __init__(
        self,
        servers: RolloutServers,
        workers: GradientWorkers,
        models: ModelServers,
        training: TrainerGroup,
        plan: Plan,
        slots: Iterable[Slot],
    ) -> None:
        self._servers = servers
        self._workers = workers
        self._models = models
        self._training = training
        self._wanted = DesiredState(plan, slots)
        self._tracker = MigrationTracker(self._wanted, servers, workers, models, training)
        self._draining: set[SlotId] = set()
        #: Whether the run is being wound down, so that nothing is started again.
        self._ending = False

    @property
    def moves(self) -> dict[SlotId, SlotMigration]:
        return self._tracker.moves

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots into which the nodes are divided now; a move that failed has changed them."""
        return self._wanted.existing

    def number_on(self, last: int) -> None:
        """A run goes on whose newest move had this number."""
        self._tracker.number_on(last)

    @property
    def at_rest(self) -> bool:
        """Whether no slot is on its way, so that no end of a turn is waited for."""
        return not self._draining and not self._tracker.moves

    def should_restart(self, replica: Replica) -> bool:
        """Whether the plan still has the process that has just ended there."""
        if self._ending or replica.detail == WHY or self._is_the_trainers(replica.slot):
            return False
        if replica.model:
            return self._wanted.models.get(replica.slot.id) == replica.model
        if replica.bucket is None:
            return replica.slot.id in self._wanted.gradient
        return self._wanted.servers.get(replica.slot.id) == replica.bucket

    def wind_down(self) -> None:
        """Start nothing again that ends from now on."""
        self._ending = True

    def plan(self, reasons: tuple[str, ...]) -> Plan:
        """Return the placement wanted now as a plan; a move that failed has changed it."""
        return self._wanted.plan(reasons)

    def role_of(self, slot: SlotId) -> Role:
        """Return the role that is wanted of the slot."""
        return self._wanted.role_of(slot)

    # -- another plan ---------------------------------------------------------------------------

    def adopt(
        self, plan: Plan, slots: Iterable[Slot], number: int, *, now: Seconds
    ) -> list[Result]:
        """Begin to move to another plan, of these slots.

        A bucket that only means other lengths moves nothing.
        """
        wanted = self._wanted
        wanted.divide(slots)
        before = {slot: (wanted.role_of(slot), wanted.served(slot)) for slot in wanted.slots}
        wanted.adopt(plan)
        actions: list[Result] = []
        for slot, bucket in wanted.servers.items():
            actions += self._servers.expect_shape(wanted.slots[slot], bucket, now=now)
        for slot in sorted(wanted.gradient):
            self._workers.expect(wanted.slots[slot], now=now)
        for slot in wanted.models:
            self._models.expect(wanted.slots[slot], now=now)
        changed = {
            slot: done
            for slot, done in before.items()
            if done[0] is not wanted.role_of(slot) or not self._keeps(slot, done[1])
        }
        return actions + self._tracker.begin(changed, number, now=now)

    def _keeps(self, slot: SlotId, before: Served | None) -> bool:
        """Whether a server of the slot, which was to be so before, is as it is to be."""
        server, wanted = self._servers.replicas.get(slot), self._wanted.served(slot)
        if isinstance(wanted, str):
            return before == wanted
        return server is None or wanted is None or server.bucket in (None, wanted)

    # -- one step, whenever something has changed -----------------------------------------------

    def settle(self, *, changed: bool, now: Seconds) -> list[Result]:
        """Take every step towards the plan that is possible now; ``changed``: whether anything has
        changed since the last call.
        """
        results = self._stop_drained(now)
        life = self._training.life
        arrived = not self.moves and life.target_slots == self._wanted.trainer
        if arrived and not changed and not results and not life.needs_room:
            return results
        results += self._stop_unwanted(now)
        results += self._stop_models(now)
        results += self._start_free(now)
        results += self._resize(now)
        results += self._return_trainer(now)
        results += self._tracker.look(now=now)
        self._servers.label_idle(self._wanted.servers)
        return results

    def _stop_unwanted(self, now: Seconds) -> list[Result]:
        actions: list[Result] = []
        servers = list(self._servers.replicas.values())
        for server in servers:
            if server.state is ReplicaState.ASLEEP and self._is_in_the_way(server):
                actions += self._servers.take_out(server, WHY, now=now)
        wrong = [one for one in servers if one.up and self._is_wrong(one)]
        # Those whose devices another server wants go first: the last one serves on beside it.
        coming = self._wanted.servers
        for server in sorted(wrong, key=lambda one: not self._is_in_the_way(one, coming)):
            if not (self._waits_for(server.slot.id, self._workers) or self._is_last(server)):
                actions += self._drain(server, now)
        for worker in self._workers.replicas.values():
            unwanted = worker.up and worker.slot.id not in self._wanted.gradient
            if unwanted and not self._waits_for(worker.slot.id, self._servers):
                actions += self._workers.leave(worker, WHY, now=now)
        return actions

    def _is_wrong(self, server: Replica) -> bool:
        """Whether the plan has another server there than this one, which is awake, or none."""
        asleep = server.state is ReplicaState.ASLEEP
        return not asleep and self._wanted.servers.get(server.slot.id) != server.bucket

    def _is_the_trainers(self, slot: Slot) -> bool:
        """Whether a trainer that returns waits for the slot, or a part of it, to be free; whatever
        a plan has there by now, the trainer is to come up first."""
        life = self._training.life
        return life.needs_room and any(slot.overlaps(rank.slot) for rank in life.replicas)

    def _stop_models(self, now: Seconds) -> list[Result]:
        """Stop the servers of frozen models that no plan has any more: what they answer, another
        one is asked."""
        return [
            result
            for one in self._models.replicas.values()
            if one.up and self._wanted.models.get(one.slot.id) != one.model
            for result in self._models.take_out(one, WHY, now=now)
        ]

    def _is_last(self, server: Replica) -> bool:
        """Whether nobody else serves yet, and none that comes up waits for its GPUs alone."""
        if server.state is not ReplicaState.SERVING or self._is_the_trainers(server.slot):
            return False
        others = [other for other in self._servers.replicas.values() if other is not server]
        if any(other.state is ReplicaState.SERVING and other.reachable for other in others):
            return False
        # What needs the trainer's devices may itself wait until this server is gone.
        ranks = [rank.slot for rank in self._training.replicas if rank.holds]
        ranks += self._training.life.reserved
        slots = [
            slot
            for slot in (self._wanted.slots[name] for name in self._wanted.servers)
            if not any(slot.overlaps(rank) for rank in ranks)
        ]
        # Slots to be joined become free one after the other, so that one of them serves meanwhile.
        leaving = [other.slot for other in others if other.holds]
        return any(
            not slot.overlaps(server.slot) or any(slot.overlaps(other) for other in leaving)
            for slot in slots
        )

    def _waits_for(self, slot: SlotId, others: ReplicaSet) -> bool:
        """Whether the old process works on until the next one, beside it, is ready."""
        if not self._tracker.overlaps(slot):
            return False
        coming = others.replicas.get(slot)
        return coming is None or coming.state not in WORKING

    def _drain(self, server: Replica, now: Seconds) -> list[Result]:
        if server.state in _LEAVING:
            return []
        if server.state is not ReplicaState.SERVING:
            return self._servers.take_out(server, WHY, now=now)
        self._draining.add(server.slot.id)
        about = server.slot.id, str(server.incarnation)
        times = [
            Wake(TimerKey(TimerOwner.DRAIN, (*about, what)).name, after_s)
            for what, after_s in ((ABORT, GRACE_S), (OUT, DRAIN_S))
        ]
        return [*self._servers.drain(server, WHY, now=now), *times]

    def _stop_drained(self, now: Seconds) -> list[Result]:
        """Stop every draining server whose last turn has ended."""
        results: list[Result] = []
        for slot in sorted(self._draining) if self._draining else ():
            server = self._servers.replicas[slot]
            if server.state is not ReplicaState.DRAINING or not server.running:
                self._draining.discard(slot)
            if server.state is ReplicaState.DRAINING and not server.running:
                results += self._retire(server, now)
        return results

    def _retire(self, server: Replica, now: Seconds) -> list[Result]:
        """Stop a drained server, or have it sleep where it may and nobody needs its memory."""
        may_sleep = self._servers.may_sleep and server.reachable
        if may_sleep and not self._is_in_the_way(server):
            return self._servers.sleep(server, WHY, now=now)
        return self._servers.take_out(server, WHY, now=now)

    def _is_in_the_way(
        self, server: Replica, wanted: Mapping[SlotId, Served] | None = None
    ) -> bool:
        """Whether another server than this one is to use its devices, for which vLLM wants all of
        their memory: one of those ``wanted``, or any of the plan."""
        if wanted is None:
            wanted = {**self._wanted.servers, **self._wanted.models}
        return any(
            server.slot.overlaps(self._wanted.slots[slot])
            and (slot, served) != (server.slot.id, server.bucket)
            for slot, served in wanted.items()
        )

    def overdue(self, timer: TimerKey, *, now: Seconds) -> list[Result]:
        """Break off the turns of a draining server whose time is up, or take the server out."""
        slot, incarnation, what = timer.about
        server = self._servers.current(slot, int(incarnation))
        if server is None or server.state is not ReplicaState.DRAINING:
            return []
        if what == ABORT:
            return [TurnsBroken(slot)]
        return self._servers.take_out(server, WHY, now=now)

    def _start_free(self, now: Seconds) -> list[Result]:
        """Start what the plan has on slots that are free for it."""
        actions: list[Result] = []
        for slot, bucket in self._wanted.servers.items():
            server = self._servers.replicas[slot]
            asleep = server.state is ReplicaState.ASLEEP and server.reachable
            if (server.startable or asleep) and self._is_free(server.slot, server):
                actions += self._come(server, bucket, now)
        for slot in sorted(self._wanted.gradient):
            worker = self._workers.at(self._wanted.slots[slot], now=now)
            if worker.startable and self._is_free(worker.slot):
                actions += self._workers.start(worker, now=now)
        for slot, name in self._wanted.models.items():
            model = self._models.at(self._wanted.slots[slot], now=now)
            if model.startable and self._is_free(model.slot, model):
                actions += self._models.serve(model, name, now=now)
        return actions

    def _come(self, server: Replica, bucket: Bucket, now: Seconds) -> list[Result]:
        if server.state is ReplicaState.ASLEEP:
            return self._servers.wake(server, now=now)
        return self._servers.start_shape(server, bucket, now=now)

    def _is_free(self, slot: Slot, server: Replica | None = None) -> bool:
        """Whether nobody uses the slot's devices. A ``server`` that is to come there wants all of
        their memory, so that none may sleep there either."""
        overlaps = self._tracker.overlaps(slot.id)
        # A trainer that is down, or is to be moved, may come back: its slots stay free for it.
        held = [
            *self._training.life.reserved,
            *(
                replica.slot
                for replica in self._replicas()
                if (replica.holds if server is None else replica.up and replica is not server)
                and not (overlaps and replica.slot.id == slot.id)
            ),
        ]
        return not any(slot.overlaps(other) for other in held)

    def _replicas(self) -> Iterator[Replica]:
        yield from self._servers.replicas.values()
        yield from self._workers.replicas.values()
        yield from self._models.replicas.values()
        yield from self._training.replicas

    def _resize(self, now: Seconds) -> list[Result]:
        """Ask the trainer to move once the slots that join it are free."""
        training, wanted = self._training, self._wanted.trainer
        if not training.life.may_resize or training.life.target_slots == wanted:
            return []
        if training.slots == wanted:
            return training.resize([], now=now)
        slots = [self._wanted.slots[slot] for slot in wanted]
        joining = [slot for slot in slots if slot.id not in training.slots]
        return training.resize(slots if self._is_left(joining) else [], now=now)

    def _return_trainer(self, now: Seconds) -> list[Result]:
        """Start a trainer that could not move, where it was, once nobody else is there."""
        ranks = [rank.slot for rank in self._training.replicas]
        if self._ending or not self._training.life.needs_room or not self._is_left(ranks):
            return []
        return self._training.in_room(now=now)

    def _is_left(self, slots: Iterable[Slot]) -> bool:
        """Whether no process but the trainer's own uses devices of these slots."""
        ranks = {id(rank) for rank in self._training.replicas}
        held = [one.slot for one in self._replicas() if one.holds and id(one) not in ranks]
        return not any(slot.overlaps(other) for slot in slots for other in held)

    @property
    def given_up(self) -> tuple[Slot, ...]:
        """The slots of nodes that are given up and not back."""
        return tuple(slot for slot in self.slots if self._servers.is_given_up(slot))

    def cannot_have(self, plan: Plan, slots: Sequence[Slot]) -> str:
        """Return why slots cannot do what a plan of these slots has for them, since a GPU of the
        trainer's is lost or their node is given up; empty if they can."""
        lost = {slot.id for slot in slots if self._training.life.has_lost(slot)}
        hit = [slot for slot in plan.train if slot in lost]
        if hit:
            return f"the trainer cannot be on {', '.join(hit)}: its GPU is lost"
        then, now = DesiredState(plan, slots), self._wanted
        away = [slot for slot in slots if self._servers.is_given_up(slot)]
        moved = [one for one in away if then.role_of(one.id) is not now.role_of(one.id)]
        nodes = ", ".join(dict.fromkeys(slot.node for slot in moved))
        words = f"{', '.join(slot.id for slot in moved)} cannot move before {nodes} is back"
        return f"{words}, which is given up" if moved else ""

    def resize_refused(self, why: str) -> list[Result]:
        """Want the trainer where it is, since it cannot be where the plan has it."""
        self._wanted.keep_trainer(self._training.slots, why)
        return [PlanMended()]

    def end(self, why: str, *, now: Seconds) -> list[Result]:
        """End the moves under way, since the run ends."""
        return self._tracker.end(why, now=now)

    def deadline(self, timer: TimerKey, *, now: Seconds) -> list[Result]:
        """Act on a phase of a move that has taken as long as it may."""
        return self._tracker.deadline(timer, now=now)

    def check(self) -> None:
        self._tracker.check()
        self._wanted.check()
        self._check_devices()

    def _check_devices(self) -> None:
        """Raise AssertionError if two processes hold one GPU; on a host without GPUs two of one
        slot may meet.
        """
        up = [replica.slot for replica in self._replicas() if replica.holds]
        devices = [device for slot in up for device in devices_of(slot)]
        if len(set(devices)) == len(devices):
            return
        held: dict[tuple[str, int | str], SlotId] = {}
        for slot in up:
            for device in devices_of(slot):
                other = held.get(device)
                alone = other is None or (other == slot.id and not slot.gpus)
                assert alone, f"{slot.id} and {other} hold {device}"
                held[device] = slot.id
