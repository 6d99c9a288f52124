"""The gate in front of the servers: every request waits here, never inside a full server.

vLLM's ``priority`` orders its waiting queue but does not preempt a full batch, so libra admits to a
server only as many requests as it has seats (``max_num_seqs``) and, for policies that ask for it,
KV cache. A request queues at the server its policy chose when its tool returned (late binding), in
the order of the policy's rank; a server with room whose own queue is empty takes over from another
queue, the longest first, if the policy lets it. A choice is looked at again when its server goes
away. Nothing is moved once it generates.

Guarantees: no more requests inside a server than it has seats; a request that has waited
``lanes.PATIENCE_S`` is overtaken by none that came later to the same queue; nothing is lost or
sent twice. Limit: a head that does not fit the KV budget holds up what is behind it, on purpose:
letting smaller ones pass would starve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra_cli.core.scheduling.baselines import SchedulingPolicy
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, SlotId, TrajectoryId, WeightVersion


class RequestScheduler:
    """Waiting requests, one queue a server, and those inside."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.lanes = ServerQueues()
        self._homeless: dict[TrajectoryId, Request] = {}
        self._queued: dict[TrajectoryId, ServerQueue] = {}
        self._inside: dict[TrajectoryId, ServerQueue] = {}
        #: Lanes that may have room for something that waits; those that have and found nothing.
        self._roomy: dict[SlotId, None] = {}
        self._spare: dict[SlotId, ServerQueue] = {}
        self._order = 0

    def __len__(self) -> int:
        return len(self._queued) + len(self._homeless)

    def waiting(self, slot: SlotId) -> int:
        """Requests that wait for this server."""
        lane = self.lanes.by_slot.get(slot)
        return len(lane.queue) if lane else 0

    # -- servers --------------------------------------------------------------------------------

    def refresh(
        self,
        lanes: Iterable[ServerQueue],
        *,
        latest: WeightVersion | None = None,
        now: Seconds,
    ) -> None:
        """These are the routable servers now, and ``latest`` the newest version.

        Requests queued at a server that is gone choose again.
        """
        before, self.lanes = self.lanes, ServerQueues(lanes, latest)
        self._roomy, self._spare = dict.fromkeys(self.lanes.by_slot), {}
        gone = [lane for lane in before if self.lanes.by_slot.get(lane.slot) is not lane]
        orphans = [request for lane in gone for request in lane.queue.values()]
        for request in orphans:
            self.withdraw(request.trajectory)
        for request in sorted([*self._homeless.values(), *orphans], key=_since):
            self.submit(request, now=now)

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request, *, now: Seconds) -> None:
        """A trajectory wants its next turn: the policy chooses the queue."""
        self._homeless.pop(request.trajectory, None)
        lane = self.policy.choose(request, self._open_to(request), now=now)
        if lane is None:
            self._homeless[request.trajectory] = request
            return
        self._order += 1
        lane.enqueue(request, self.policy.rank(request), self._order)
        self._queued[request.trajectory] = lane
        self._roomy[lane.slot] = None

    def _open_to(self, request: Request) -> ServerQueues:
        return self.lanes if request.turns else self.lanes.newest

    def withdraw(self, trajectory: TrajectoryId) -> None:
        """Forget a request, if it waits here."""
        self._homeless.pop(trajectory, None)
        lane = self._queued.pop(trajectory, None)
        if lane is not None:
            lane.dequeue(trajectory)

    def left(self, trajectory: TrajectoryId) -> None:
        """A request is no longer inside its server."""
        lane = self._inside.pop(trajectory)
        lane.leave(trajectory)
        if self.lanes.by_slot.get(lane.slot) is lane:
            self._roomy[lane.slot] = None

    def dispatch(self, *, now: Seconds) -> Iterator[tuple[Request, ServerQueue]]:
        """Take out every request that its server, or another, has room for."""
        while self._queued and self._roomy:
            lane = self.lanes.by_slot[next(iter(self._roomy))]
            request = self._next_for(lane, now)
            if request is None:
                self._set_aside(lane)
                continue
            self._spare.pop(lane.slot, None)
            self.withdraw(request.trajectory)
            lane.enter(request)
            self._inside[request.trajectory] = lane
            yield request, lane

    def _set_aside(self, lane: ServerQueue) -> None:
        """Nothing for this lane now. If it holds something up, wake the fastest that has room."""
        del self._roomy[lane.slot]
        self._spare.pop(lane.slot, None)
        if not lane.queue:
            if lane.has_seat:
                self._spare[lane.slot] = lane
        elif self._spare:
            fastest = min(self._spare.values(), key=_pace)
            del self._spare[fastest.slot]
            self._roomy[fastest.slot] = None

    def _next_for(self, lane: ServerQueue, now: Seconds) -> Request | None:
        if not lane.has_seat:
            return None
        if lane.queue:
            head = lane.head(now)
            return head if head is not None and self.policy.admits(head, lane) else None
        return self._from_elsewhere(lane, now)

    def _from_elsewhere(self, thief: ServerQueue, now: Seconds) -> Request | None:
        """The head of the longest other queue, if the policy lets it go."""
        home = max((lane for lane in self.lanes if lane.queue), key=_fullness)
        request = home.head(now)
        if request is None or self._enters(request, home):
            return None
        if thief.slot not in self._open_to(request).by_slot:
            return None
        if not self.policy.admits(request, thief):
            return None
        return request if self.policy.lets_go(request, home, thief, now=now) else None

    def _enters(self, request: Request, home: ServerQueue) -> bool:
        return home.has_seat and self.policy.admits(request, home)

    def check(self) -> None:
        """Invariants that hold between any two events."""
        for slot, lane in self.lanes.by_slot.items():
            assert lane.running <= lane.bucket.max_num_seqs, slot
            assert lane.context == sum(lane.inside.values()), slot
            assert lane.queued_context == sum(r.context for r in lane.queue.values()), slot
        queued = [who for lane in self.lanes for who in lane.queue]
        assert sorted(queued) == sorted(self._queued), "a queue and the index disagree"


def _since(request: Request) -> Seconds:
    return request.waiting_since


def _pace(lane: ServerQueue) -> Seconds:
    return lane.pace


def _fullness(lane: ServerQueue) -> float:
    return len(lane.queue) / lane.bucket.max_num_seqs
