"""Hands the notices of one part to the part they are for, and keeps
what can wait until the machine settles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from libra_cli.core import notices as n
from libra_cli.core.actions import Action, Save
from libra_cli.core.cluster.replica import Replica, ReplicaState, shown, slot_record
from libra_cli.core.cluster.replica_set import ReplicaSet
from libra_cli.core.records import SlotRecord
from libra_cli.core.rollout.staleness import rule_of
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.watch import RunWatch
from libra_cli.core.types import Seconds, SlotId


@dataclass(slots=True)
class Agenda:
    """The work that notices leave until the machine settles, or writes its rows."""

    #: Slots whose row is to be written, with a replica there that has changed.
    rows: dict[SlotId, Replica] = field(default_factory=dict)
    #: Servers that were taken out, and whether they died.
    lost: dict[SlotId, bool] = field(default_factory=dict)
    #: Whether the scheduler has yet to hear which servers are routable now.
    reroute: bool = False
    #: Whether a slot, or what is wanted of one, has changed since the reconciler last looked.
    look: bool = True
    #: Whether a failure has changed the plan.
    plan_repaired: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.look or self.reroute or self.rows or self.lost or self.plan_repaired)


@dataclass(slots=True)
class NoticeRouter:
    """Hands each notice to the part that it is for."""

    parts: RunParts
    watch: RunWatch
    agenda: Agenda = field(default_factory=Agenda)

    def route(self, results: Iterable[n.Result], actions: list[Action], now: Seconds) -> None:
        """Hand notices on, each before the next result is asked for, and gather the actions."""
        for result in results:
            if not isinstance(result, n.NoticeBase):
                actions.append(result)
            elif more := self._deliver(result, now):
                self.route(more, actions, now)

    def _deliver(self, notice: n.Notice, now: Seconds) -> Iterable[n.Result]:
        """Tell a notice to the part that it is for, and return what follows."""
        match notice:
            case n.RequestSent() | n.RequestEnded() | n.RequestBroke():
                return self._tell_servers(notice, now)
            case n.ServerProved() | n.TurnsBroken() | n.GroupClosed() | n.ServerAnswered():
                return self._tell_rollout(notice, now)
            case n.StepClaimed() | n.StepOver():
                return self._tell_of_step(notice, now)
            case n.StepTaken(row):
                return self.watch.step_taken(row, now=now)
            case n.BoundChosen(bound):
                return self._open_under(bound)
            case n.VersionOut() | n.VersionsLost():
                return self._tell_of_versions(notice)
            case n.ProcessGone() | n.ResizeRefused():
                return self._ask_reconciler(notice, now)
            case n.ReplicaChanged() | n.RoutingChanged() | n.ServerLost() | n.PlanMended():
                return self._defer(notice)
            case _:
                assert_never(notice)

    def _tell_servers(
        self, notice: n.RequestSent | n.RequestEnded | n.RequestBroke, now: Seconds
    ) -> list[n.Result]:
        servers = self.parts.servers
        match notice:
            case n.RequestSent(slot):
                servers.request_sent(slot, now=now)
            case n.RequestEnded(slot, answered):
                servers.request_ended(slot, answered=answered, now=now)
            case n.RequestBroke(slot, reason, group):
                return servers.request_broke(slot, reason, group, now=now)
            case _:
                assert_never(notice)
        return []

    def _tell_rollout(
        self,
        notice: n.ServerProved | n.TurnsBroken | n.GroupClosed | n.ServerAnswered,
        now: Seconds,
    ) -> list[n.Result]:
        match notice:
            case n.ServerProved(slot):
                return self.parts.rollout.proved(slot, now=now)
            case n.TurnsBroken(slot):
                return self.parts.rollout.abort(slot)
            case n.GroupClosed(group):
                return self.parts.rollout.closed(group, now=now)
            case n.ServerAnswered(slot):
                return self.parts.rollout.answered(slot)
            case _:
                assert_never(notice)

    def _tell_of_step(self, notice: n.StepClaimed | n.StepOver, now: Seconds) -> list[n.Result]:
        servers, workers = self.parts.servers, self.parts.workers
        if isinstance(notice, n.StepOver):
            return workers.step_over(notice, now=now)
        gpus = sum(rank.slot.num_devices for rank in self.parts.training.replicas)
        train = notice.train
        shares = workers.shares(train.samples, gpus, train.step)
        return [*servers.step_begins(), replace(train, shares=shares)]

    def _open_under(self, bound: int) -> list[n.Result]:
        self.parts.ledger.rule = rule_of(self.parts.recipe.training, bound)
        return []

    def _tell_of_versions(self, notice: n.VersionOut | n.VersionsLost) -> list[n.Result]:
        results: list[n.Result] = []
        for some in (self.parts.servers, self.parts.workers):
            if isinstance(notice, n.VersionOut):
                results += some.publish(notice.published)
            else:
                some.latest = None
        return results

    def _ask_reconciler(
        self, notice: n.ProcessGone | n.ResizeRefused, now: Seconds
    ) -> list[n.Result]:
        parts = self.parts
        if isinstance(notice, n.ResizeRefused):
            return parts.reconciler.resize_refused(notice.why)
        replica, again = notice.replica, parts.reconciler.should_restart(notice.replica)
        every: tuple[ReplicaSet, ...] = (parts.servers, parts.workers, parts.models)
        (own,) = (some for some in every if some.replicas.get(replica.slot.id) is replica)
        return own.after_end(replica, again=again, now=now)

    def _defer(
        self, notice: n.ReplicaChanged | n.RoutingChanged | n.ServerLost | n.PlanMended
    ) -> list[n.Result]:
        """Leave a notice until the machine settles."""
        agenda = self.agenda
        match notice:
            case n.ReplicaChanged(replica):
                slot = replica.slot.id
                agenda.rows[slot] = replica
                agenda.look = True
                agenda.reroute = agenda.reroute or self.parts.servers.replicas.get(slot) is replica
            case n.RoutingChanged():
                agenda.reroute = True
            case n.ServerLost(slot, died):
                agenda.lost[slot] = died
            case n.PlanMended():
                agenda.plan_repaired = agenda.look = True
            case _:
                assert_never(notice)
        return []

    def slot_rows(self, now: Seconds, waiting: Callable[[SlotId], int]) -> list[Action]:
        """Return a row for each slot that has changed: that of the replica that works.

        ``waiting`` returns how many requests wait for a slot's server.
        """
        if not self.agenda.rows:
            return []
        changed, self.agenda.rows = self.agenda.rows, {}
        rows = (
            slot_record(self._shown(slot, last), now=now, waiting=waiting(slot))
            for slot, last in changed.items()
        )
        return [Save(self._with_sleeper(row)) for row in rows]

    def _with_sleeper(self, row: SlotRecord) -> SlotRecord:
        """Tell of a server that sleeps where something else works."""
        server = self.parts.servers.replicas.get(row.slot)
        if server is None or server.state is not ReplicaState.ASLEEP or row.state == "asleep":
            return row
        return replace(row, detail="; ".join(filter(None, (row.detail, "its server is asleep"))))

    def _shown(self, slot: SlotId, last: Replica) -> Replica:
        parts = self.parts
        sets = (parts.servers, parts.workers, parts.models)
        there = [some.replicas[slot] for some in sets if slot in some.replicas]
        rank = next((rank for rank in parts.training.replicas if rank.slot.id == slot), None)
        # One that the trainer has just left is no longer among its replicas.
        return shown((*there, last) if rank is None else (*there, rank, last))
