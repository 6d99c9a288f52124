"""The request scheduler: every request waits here, never inside a full server.

vLLM's ``priority`` orders its waiting queue but does not preempt a full batch, so libra admits to a
server only as many requests as it has seats (``max_num_seqs``) and, for policies that ask for it,
KV cache. A request queues at the server its policy chose when its tool returned (late binding), in
the order of the policy's rank. An idle server (one with a free seat and an empty queue) takes over
the head of the longest other queue, if the policy allows it. A choice is looked at again when its
server goes away. Nothing is moved once it generates.

A trajectory begins only where the newest version is. Servers come to it one after the other, within
moments, and all that waits to begin would go to the first of them. So a beginning queues at any
server, behind what goes on there, and enters when that has the version; ``BEGIN_PATIENCE_S`` after
the first server had it, beginnings choose again among those that have it.

Guarantees: no more requests inside a server than it has seats; nothing is lost or sent twice.
Limits: a head that does not fit the KV budget holds up what is behind it, on purpose: letting
smaller ones pass would starve it. Nothing else keeps a rank from doing that: no more trajectories
are in play than the staleness bound admits, so those that pass a request come to an end.

**Evaluations** queue apart, so that no choice of a policy counts what waits of them. A server takes
such a request while it has a free seat that no request of training waits for, and at most
``EVALUATION_SHARE`` of its seats. That they do not starve where seats are never free, one that has
waited for ``EVALUATION_PATIENCE_S`` takes the next seat that is, within the same share. When
training is over they have all seats and go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, SlotId, TrajectoryId, WeightVersion, is_evaluation

EVALUATION_SHARE = 0.25
"""The most of a server's seats that evaluations take while there is training; one at least.
Chosen: it bounds what a request of training may find taken, since no turn is preempted."""
EVALUATION_PATIENCE_S: Seconds = 30.0
"""Seconds after which an evaluation's request takes the next seat. Chosen: longer than most turns,
so that training goes first wherever seats become free.
"""
BEGIN_PATIENCE_S: Seconds = 5.0
"""Seconds for which trajectories wait to begin on servers that are still to get a version which
another has. Chosen: a version reaches servers of one network within less of each other.
"""


class RequestScheduler:
    """The waiting requests, one queue a server, and the requests inside servers."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.queues = ServerQueues()
        self._unplaced: dict[TrajectoryId, Request] = {}
        self._queued: dict[TrajectoryId, ServerQueue] = {}
        self._inside: dict[TrajectoryId, ServerQueue] = {}
        #: Servers that may have room for something that waits; those that have and found nothing.
        self._roomy: dict[SlotId, None] = {}
        self._spare: dict[SlotId, ServerQueue] = {}
        self._order = 0
        #: Those that wait to begin for the version of the server that they queue at.
        self._early: dict[TrajectoryId, None] = {}
        self._latest: WeightVersion | None = None
        #: When a server first had the newest version.
        self._latest_since: Seconds = inf
        #: Requests of evaluations that wait, in the order they came.
        self._evaluations: dict[TrajectoryId, Request] = {}
        #: Whether nothing is trained any more.
        self.training_over = False

    def __len__(self) -> int:
        return len(self._queued) + len(self._unplaced)

    def waiting(self, slot: SlotId) -> int:
        """Return how many requests wait for this server."""
        queue = self.queues.by_slot.get(slot)
        return len(queue.waiting) if queue else 0

    # -- servers --------------------------------------------------------------------------------

    def refresh(
        self,
        queues: Iterable[ServerQueue],
        *,
        latest: WeightVersion | None = None,
        now: Seconds,
    ) -> None:
        """Take the routable servers, and ``latest`` as the newest version.

        Requests queued at a server that is gone choose again, and those that wait to begin.
        """
        before, self.queues = self.queues, ServerQueues(queues, latest)
        self._roomy, self._spare = dict.fromkeys(self.queues.by_slot), {}
        if latest != self._latest:
            self._latest, self._latest_since = latest, inf
        if len(self.queues.newest):
            self._latest_since = min(self._latest_since, now)
        gone = [queue for queue in before if self.queues.by_slot.get(queue.slot) is not queue]
        orphans = {who: request for queue in gone for who, request in queue.waiting.items()}
        orphans |= {who: self._queued[who].waiting[who] for who in self._early}
        self._choose_again([*self._unplaced.values(), *orphans.values()], now)

    def _choose_again(self, requests: Iterable[Request], now: Seconds) -> None:
        for request in sorted(requests, key=_since):
            self.withdraw(request.trajectory)
            self.submit(request, now=now)

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request, *, now: Seconds) -> None:
        """Queue the request for a trajectory's next turn where the policy chooses."""
        if is_evaluation(request.trajectory.group):
            self._evaluations[request.trajectory] = request
            self._roomy |= dict.fromkeys(self._spare)
            self._spare.clear()
            return
        self._unplaced.pop(request.trajectory, None)
        patient = now < self._latest_since + BEGIN_PATIENCE_S
        open_to = self.queues if patient else self._open_to(request)
        queue = self.policy.choose(request, open_to, now=now)
        if queue is None:
            self._unplaced[request.trajectory] = request
            return
        self._order += 1
        rank = self.policy.rank(request)
        if queue.slot not in self._open_to(request).by_slot:
            self._early[request.trajectory] = None
            rank = inf
        queue.enqueue(request, rank, self._order)
        self._queued[request.trajectory] = queue
        self._roomy[queue.slot] = None

    def _open_to(self, request: Request) -> ServerQueues:
        return self.queues if request.turns else self.queues.newest

    def withdraw(self, trajectory: TrajectoryId) -> None:
        """Forget a request, if it waits here."""
        self._evaluations.pop(trajectory, None)
        self._unplaced.pop(trajectory, None)
        self._early.pop(trajectory, None)
        queue = self._queued.pop(trajectory, None)
        if queue is not None:
            queue.dequeue(trajectory)

    def left(self, trajectory: TrajectoryId) -> None:
        """Take a request out of its server, which has answered it or is gone."""
        queue = self._inside.pop(trajectory)
        queue.leave(trajectory)
        if self.queues.by_slot.get(queue.slot) is queue:
            self._roomy[queue.slot] = None

    def dispatch(self, *, now: Seconds) -> Iterator[tuple[Request, ServerQueue]]:
        """Take out every request that its server, or another, has room for."""
        if self._early and now >= self._latest_since + BEGIN_PATIENCE_S:
            self._choose_again([self._queued[who].waiting[who] for who in self._early], now)
        while self._roomy and (self._queued or self._evaluations):
            queue = self.queues.by_slot[next(iter(self._roomy))]
            request = self._next_for(queue, now)
            if request is None:
                self._set_aside(queue)
                continue
            self._spare.pop(queue.slot, None)
            self._take_out(request, queue)
            queue.enter(request)
            self._inside[request.trajectory] = queue
            yield request, queue

    def _take_out(self, request: Request, entered: ServerQueue) -> None:
        """Let a request wait no longer; the queue that it enters takes it out of its own line."""
        if self._evaluations.pop(request.trajectory, None) is not None:
            return
        queued = self._queued.pop(request.trajectory)
        self._early.pop(request.trajectory, None)
        if queued is not entered:
            queued.dequeue(request.trajectory)

    def _set_aside(self, queue: ServerQueue) -> None:
        """Let no request enter this server now; if a request waits
        there, wake the fastest server with room.
        """
        del self._roomy[queue.slot]
        self._spare.pop(queue.slot, None)
        if not queue.waiting:
            if queue.has_seat:
                self._spare[queue.slot] = queue
        elif self._spare:
            fastest = min(self._spare.values(), key=_next_step_s)
            del self._spare[fastest.slot]
            self._roomy[fastest.slot] = None

    def _next_for(self, queue: ServerQueue, now: Seconds) -> Request | None:
        if not queue.has_seat:
            return None
        if self._evaluations and self._evaluations_first(now):
            first = self._evaluation_for(queue)
            if first is not None:
                return first
        if queue.waiting:
            head = queue.head()
            return head if head is not None and self._enters(head, queue) else None
        return self._steal_for(queue, now) or self._evaluation_for(queue)

    def _evaluations_first(self, now: Seconds) -> bool:
        oldest = next(iter(self._evaluations.values()))
        return self.training_over or now - oldest.waiting_since >= EVALUATION_PATIENCE_S

    @property
    def evaluation_seats(self) -> int:
        """The most requests of evaluations that may be in all servers together."""
        return sum(self._evaluation_seats(queue) for queue in self.queues)

    def _evaluation_seats(self, queue: ServerQueue) -> int:
        seats = queue.bucket.max_num_seqs
        return seats if self.training_over else max(1, int(EVALUATION_SHARE * seats))

    def _evaluation_for(self, queue: ServerQueue) -> Request | None:
        """The request of an evaluation that enters, rather one whose context is cached there."""
        inside = sum(is_evaluation(who.group) for who in queue.inside)
        if inside >= self._evaluation_seats(queue):
            return None
        admitted = [
            request
            for request in self._evaluations.values()
            if queue.slot in self._open_to(request).by_slot and self.policy.admits(request, queue)
        ]
        held = (request for request in admitted if request.last_slot == queue.slot)
        return next(held, admitted[0] if admitted else None)

    def _steal_for(self, idle: ServerQueue, now: Seconds) -> Request | None:
        """The head of the longest other queue, if the policy allows it."""
        if not self._queued:
            return None
        queued = max((queue for queue in self.queues if queue.waiting), key=_fullness)
        request = queued.head()
        if request is None or self._enters(request, queued):
            return None
        if idle.slot not in self._open_to(request).by_slot:
            return None
        if not self.policy.admits(request, idle):
            return None
        return request if self.policy.allow_steal(request, queued, idle, now=now) else None

    def _enters(self, request: Request, queued: ServerQueue) -> bool:
        open_to = request.trajectory not in self._early
        return open_to and queued.has_seat and self.policy.admits(request, queued)

    def check(self) -> None:
        """Raise AssertionError if a server has more requests than
        seats, or contexts are counted wrongly.
        """
        for slot, queue in self.queues.by_slot.items():
            assert queue.running <= queue.bucket.max_num_seqs, slot
            assert queue.context == sum(queue.inside.values()), slot
            assert queue.queued_context == sum(r.context for r in queue.waiting.values()), slot
        queued = [who for queue in self.queues for who in queue.waiting]
        assert sorted(queued) == sorted(self._queued), "a queue and the index disagree"
        assert not self._evaluations.keys() & self._inside.keys(), "one waits that is inside"


def _since(request: Request) -> Seconds:
    return request.waiting_since


def _next_step_s(queue: ServerQueue) -> Seconds:
    return queue.next_step_s


def _fullness(queue: ServerQueue) -> float:
    return len(queue.waiting) / queue.bucket.max_num_seqs
