"""Following the moves under way: which phase each is in, and what becomes of one that fails.

It starts and stops nothing by itself, save at a deadline: it looks at the states of the processes
on a slot, which the reconciler brings about, and tells the phases of ``LIFECYCLE`` from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from libra_cli.core.actions import Save, Wake
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.model_servers import ModelServers
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import ReplicaSet
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.cluster.trainer import TrainerGroup
from libra_cli.core.notices import PlanMended, Result
from libra_cli.core.reconcile.desired_state import DesiredState, Served
from libra_cli.core.reconcile.migration import (
    DONE,
    FAILED,
    LIFECYCLE,
    MigrationPhase,
    SlotMigration,
)
from libra_cli.core.timer_key import TimerKey
from libra_cli.core.types import Role, Seconds, Slot, SlotId

Reshape: TypeAlias = Mapping[SlotId, tuple[Role, Served | None]]
"""Slots that change together, with what each did before."""
WORKING = (ReplicaState.SERVING, ReplicaState.TRAINING)
_COMING = {
    ReplicaState.STARTING: MigrationPhase.START,
    ReplicaState.WAKING: MigrationPhase.START,
    ReplicaState.JOINING: MigrationPhase.SYNC,
}
_LEAVING = {
    ReplicaState.DRAINING: MigrationPhase.DRAIN,
    ReplicaState.FALLING_ASLEEP: MigrationPhase.STOP,
    ReplicaState.STOPPING: MigrationPhase.STOP,
}


class MigrationTracker:
    """The moves under way. Methods return the actions and notices that follow."""

    def __init__(
        self,
        wanted: DesiredState,
        servers: RolloutServers,
        workers: GradientWorkers,
        models: ModelServers,
        training: TrainerGroup,
    ) -> None:
        self._wanted = wanted
        self._servers = servers
        self._workers = workers
        self._models = models
        self._training = training
        self.moves: dict[SlotId, SlotMigration] = {}
        self._reshapes: list[Reshape] = []
        self._number = 0

    def number_on(self, last: int) -> None:
        """A run goes on whose newest move had this number."""
        self._number = last

    def begin(self, changed: Reshape, plan: int, *, now: Seconds) -> list[Result]:
        """Begin the moves of these slots to their new roles, for plan number ``plan``."""
        self._reshapes = [old for old in self._reshapes if old.keys().isdisjoint(changed)]
        for group in _overlapping([self._wanted.slots[slot] for slot in changed]):
            self._reshapes.append({slot: changed[slot] for slot in group})
        return [
            result
            for slot, (role, served) in changed.items()
            for result in self._begin(slot, role, served, plan, now)
        ]

    def _begin(
        self, slot: SlotId, before: Role, served: Served | None, plan: int, now: Seconds
    ) -> list[Result]:
        """A move that was under way there is over."""
        actions: list[Result] = []
        under_way = self.moves.pop(slot, None)
        if under_way is not None:
            under_way.end(FAILED, now=now, detail=f"plan {plan} has something else on the slot")
            actions.append(Save(under_way.record()))
        self._number += 1
        after = self._wanted.role_of(slot)
        elastic = {before, after} == {Role.ROLLOUT, Role.GRADIENT}
        # On a host without GPUs two processes fit; on a GPU vLLM has taken the memory.
        overlap = elastic and not self._wanted.slots[slot].gpus
        move = SlotMigration(self._number, plan, slot, before, after, overlap, served, now)
        move.detail = self._story(slot, before, after)
        self.moves[slot] = move
        return [*actions, Save(move.record())]

    def _story(self, slot: SlotId, before: Role, after: Role) -> str:
        """Return which slots this one makes way for, or replaces;
        empty if it is not joined or split.
        """
        group = next((group for group in self._reshapes if slot in group), {})
        slots, mine = self._wanted.slots, self._wanted.slots[slot]
        others = [other for other in group if other != slot and slots[other].overlaps(mine)]
        if not others or Role.IDLE not in (before, after):
            return ""
        return f"{'makes way for' if after is Role.IDLE else 'instead of'} {', '.join(others)}"

    def overlaps(self, slot: SlotId) -> bool:
        """Whether the slot's next process starts beside the one that is there."""
        move = self.moves.get(slot)
        return move is not None and move.overlap_start

    def look(self, *, now: Seconds) -> list[Result]:
        """Take each migration to the phase that it is in now."""
        results: list[Result] = []
        for move in list(self.moves.values()):
            if self.moves.get(move.slot) is move:  # one that failed may have ended others
                results += self._follow(move, now)
        servers = (self._servers.replicas[slot] for slot in self._wanted.servers)
        if all(server.state is ReplicaState.FAILED for server in servers):
            results += self._keep_a_server()
        return results

    def end(self, why: str, *, now: Seconds) -> list[Result]:
        """End the moves under way, since the run ends: as failed, but where the new process works
        and only waits for its first request or share."""
        actions: list[Result] = []
        for move in list(self.moves.values()):
            if move.phase is MigrationPhase.JOIN:
                actions += self._done(move, now)
                continue
            move.end(FAILED, now=now, detail=why)
            actions.append(Save(move.record()))
        self.moves.clear()
        return actions

    def check(self) -> None:
        for slot, move in self.moves.items():
            assert move.ended_at is None, f"the move of {slot} has ended and is kept"

    # -- the phase it is in ---------------------------------------------------------------------

    def _tenant(self, slot: SlotId, role: Role) -> Replica | None:
        if role in (sets := self._sets):
            return sets[role].replicas.get(slot)
        ranks = (rank for rank in self._training.replicas if rank.slot.id == slot)
        return next(ranks, None) if role is Role.TRAIN else None

    @property
    def _sets(self) -> dict[Role, ReplicaSet]:
        return {one.role: one for one in (self._servers, self._workers, self._models)}

    def _follow(self, move: SlotMigration, now: Seconds) -> list[Result]:
        old, new = self._tenant(move.slot, move.before), self._tenant(move.slot, move.after)
        if move.before is move.after or (
            move.before is Role.TRAIN and not self._training.life.resizing
        ):
            # The same replica is stopped and started again; or the trainer has only crashed.
            old = None
        broken = self._broken(move, new)
        if broken:
            return self._give_back(move, broken, now)
        over = move.after is Role.IDLE and not (old and old.holds)
        phase = MigrationPhase.JOIN if over else _phase(move, old, new)
        actions: list[Result] = []
        if new is not None:
            self._tell_sync(move, new, now)
        if phase is not None and move.enter(phase, now=now):
            actions += self._entered(move, phase, new)
        if phase is MigrationPhase.JOIN and self._has_joined(move, new):
            actions += self._done(move, now)
        return actions

    def _entered(
        self, move: SlotMigration, phase: MigrationPhase, new: Replica | None
    ) -> list[Result]:
        if (
            phase in (MigrationPhase.START, MigrationPhase.SYNC)
            and new is not None
            and move.incarnation is None
        ):
            move.incarnation, move.request_s = new.incarnation, new.request_s
        return [Wake(move.timer.name, LIFECYCLE[phase].deadline_s), Save(move.record())]

    def _broken(self, move: SlotMigration, new: Replica | None) -> str:
        """Return why the new process is no more, or will not be; empty while it may come up."""
        if Role.TRAIN in (move.before, move.after):
            kept = (move.after is Role.TRAIN) == (move.slot in self._wanted.trainer)
            if not kept:
                return self._wanted.refusal
        if move.after in self._sets and self._wanted.role_of(move.slot) is not move.after:
            return "the plan was mended, and has something else there"
        if new is None or move.after is Role.TRAIN:
            return ""
        if self._is_out_of_reach(new):
            return f"{new.slot.node} is given up, and nothing starts there before it is back"
        failed = new.state is ReplicaState.FAILED or move.incarnation not in (None, new.incarnation)
        return (new.detail or "its process ended") if failed else ""

    def _is_out_of_reach(self, new: Replica) -> bool:
        """Whether a process is yet to start on a node that is given up; one for which the trainer
        is to leave the slot waits, as the trainer does, for the node to be back."""
        gone = new.state is ReplicaState.IDLE and self._servers.is_given_up(new.slot)
        return gone and new.slot.id not in self._training.slots

    def _tell_sync(self, move: SlotMigration, new: Replica, now: Seconds) -> None:
        """End phase ``sync`` by a server's one reply, which says when the version was loaded."""
        if move.phase is MigrationPhase.SYNC and new.state in WORKING:
            began = move.phases[-1][1]
            # The host that loaded it has a clock of its own.
            move.enter(MigrationPhase.VERIFY, now=min(max(new.loaded_at, began), now))

    def _has_joined(self, move: SlotMigration, new: Replica | None) -> bool:
        if move.after is Role.ROLLOUT and new is not None:
            return new.running > 0 or new.request_s > move.request_s
        return move.after is not Role.GRADIENT or move.slot in self._workers.used

    def _done(self, move: SlotMigration, now: Seconds) -> list[Result]:
        move.end(DONE, now=now, detail=move.detail)
        del self.moves[move.slot]
        return [Save(move.record())]

    # -- when it fails --------------------------------------------------------------------------

    def deadline(self, timer: TimerKey, *, now: Seconds) -> list[Result]:
        """Act on a phase that has taken as long as it may: end it, or fail the move."""
        move = next((m for m in self.moves.values() if m.timer == timer), None)
        if move is None or move.phase is None:
            return []
        if move.phase is MigrationPhase.JOIN:
            return self._done(move, now)
        why = f"{move.phase} took longer than {LIFECYCLE[move.phase].deadline_s:.0f} s"
        if move.phase is MigrationPhase.DRAIN:
            return self._end_drain(move.slot, why, now)
        if move.phase is MigrationPhase.STOP:
            return self._give_back(move, why, now) if self._is_stopping(move.slot) else []
        return self._stop_new(move, why, now) or self._give_back(move, why, now)

    def _end_drain(self, slot: SlotId, why: str, now: Seconds) -> list[Result]:
        """The move goes on without what the old process has yet to say."""
        server, worker = self._servers.replicas.get(slot), self._workers.replicas.get(slot)
        if server is not None and server.state is ReplicaState.DRAINING:
            return self._servers.take_out(server, why, now=now)
        if worker is not None and worker.state is ReplicaState.DRAINING:
            return self._workers.take_out(worker, why, now=now)
        return []

    def _is_stopping(self, slot: SlotId) -> bool:
        """Whether a process there is not gone yet; else the slot waits for the trainer."""
        roles = (*self._sets, Role.TRAIN)
        tenants = (self._tenant(slot, role) for role in roles)
        return any(t is not None and t.state is ReplicaState.STOPPING for t in tenants)

    def _stop_new(self, move: SlotMigration, why: str, now: Seconds) -> list[Result]:
        """Stop the new process of a move that is overdue; the move fails by that."""
        if move.after is Role.TRAIN:
            return self._training.failed(why, now=now)
        new = self._tenant(move.slot, move.after)
        if new is None:
            return []
        return self._sets[move.after].take_out(new, why, now=now)

    def _give_back(self, move: SlotMigration, why: str, now: Seconds) -> list[Result]:
        """Let the slot of a move that failed do again what it did before, or nothing.

        Slots that were being joined or split are all what they were.
        """
        group = next((group for group in self._reshapes if move.slot in group), None)
        if group is not None:
            return self._undo(group, f"{move.slot}: {why}", now)
        if move.after is Role.TRAIN and move.slot in self._wanted.trainer:
            self._wanted.keep_trainer(self._training.life.proved_slots, why)
        self._wanted.give_back(move.slot, move.before, move.served)
        role = self._wanted.role_of(move.slot)
        tenant = self._tenant(move.slot, role)
        left = "is free"
        if role is not Role.IDLE:
            works = tenant is not None and tenant.state in WORKING
            left = f"goes on as {role}" if works else f"is given back to {role}"
        move.end(FAILED, now=now, detail=f"{why}; the slot {left}")
        del self.moves[move.slot]
        return [Save(move.record()), PlanMended()]

    def _undo(self, group: Reshape, why: str, now: Seconds) -> list[Result]:
        self._reshapes.remove(group)
        for slot, (role, served) in group.items():
            self._wanted.give_back(slot, role, served)
        actions: list[Result] = []
        held = ", ".join(slot for slot, (role, _) in group.items() if role is not Role.IDLE)
        for move in [self.moves.pop(slot) for slot in group if slot in self.moves]:
            move.end(FAILED, now=now, detail=f"{why}; there is {held} again")
            actions.append(Save(move.record()))
        return [*actions, PlanMended()]

    def _may_serve(self, server: Replica) -> bool:
        """Whether a server could be kept, or started again: the trainer leaves it its slot, or can
        go back to where it was if this server has worked."""
        life, wanted = self._training.life, self._wanted
        # One that resizes has left the others; if it comes back, the plan is mended once more.
        kept = [one for one in life.proved_slots if not life.resizing or one in wanted.trainer]
        if any(server.slot.overlaps(wanted.slots[one]) for one in kept):
            return False
        if server.state in (ReplicaState.SERVING, ReplicaState.FAILED):
            return server.state is ReplicaState.SERVING
        if not wanted.trains_on(server.slot):
            return True
        back = [wanted.slots[one] for one in life.proved_slots]
        barred = any(one.overlaps(server.slot) or self._servers.is_given_up(one) for one in back)
        return life.resizing and server.has_worked and not barred

    def _keep_a_server(self) -> list[Result]:
        """Keep the server likeliest to work, if the plan has no other that could serve."""
        known = [server for server in self._servers.replicas.values() if self._may_serve(server)]
        if not known:
            return []
        best = max(known, key=self._hope)
        if self._wanted.trains_on(best.slot):
            why = f"{best.slot.id} has the last server, and no other came up"
            self._wanted.keep_trainer(self._training.life.proved_slots, why)
        if best.bucket is not None:
            self._wanted.give_back(best.slot.id, Role.ROLLOUT, best.bucket)
        return [PlanMended()]

    def _hope(self, server: Replica) -> tuple[bool, bool, bool, bool]:
        """Return a key that is the greater, the likelier and sooner a server works there."""
        there = not self._servers.is_given_up(server.slot)
        free = not self._wanted.trains_on(server.slot)
        return server.state is ReplicaState.SERVING, there, server.has_worked, free


def _phase(move: SlotMigration, old: Replica | None, new: Replica | None) -> MigrationPhase | None:
    """Return the phase that the states of the slot's processes show; None before the first."""
    if new is not None and new.state in _COMING:
        return _COMING[new.state]
    if old is not None and old.state in _LEAVING:
        return _LEAVING[old.state]
    gone = old is None or not old.holds
    if new is not None and new.state in _LEAVING and gone:
        return _LEAVING[new.state]  # of another shape than it is to be, or of a plan before
    if new is not None and new.state in WORKING and gone:
        return MigrationPhase.JOIN if move.phases else None
    return None


def _overlapping(slots: Sequence[Slot]) -> list[list[SlotId]]:
    """The slots that share devices, directly or through one another; none that shares none."""
    groups: list[list[Slot]] = []
    for slot in slots:
        hit = [group for group in groups if any(slot.overlaps(other) for other in group)]
        joined = [*(other for group in hit for other in group), slot]
        groups = [*(group for group in groups if group not in hit), joined]
    return [[slot.id for slot in group] for group in groups if len(group) > 1]
