"""One server as the request scheduler sees it: what is inside, and the queue in front of it.

Its KV budget counts the contexts of the requests inside, as they were when they went in, plus what
each is expected to add in one turn. Contexts between turns are not counted: vLLM keeps them as long
as it has room and drops the oldest when it has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.types import (
    Bucket,
    Seconds,
    SlotId,
    Tokens,
    TrajectoryId,
    WeightVersion,
    kv_key,
)


@dataclass(frozen=True, slots=True)
class Request:
    """A trajectory that wants its next turn generated: all that a policy may know of it.

    ``context`` are its tokens now, ``generated`` those the model produced, ``tools`` the finished
    tool calls. ``last_key`` is the ``kv_key`` of its last turn, and ``kv_since`` the oldest version
    whose KV it may use; None: that of its server alone. ``expected`` are the tokens it has yet to
    generate, by the policy's estimator; 0 where there is none.
    """

    trajectory: TrajectoryId
    context: Tokens
    generated: Tokens
    turns: int
    tools: int
    waiting_since: Seconds
    last_slot: SlotId | None
    last_key: WeightVersion | None
    expected: float = 0.0
    kv_since: WeightVersion | None = None


@dataclass(slots=True)
class ServerQueue:
    """The queue of one routable server. ``key`` is the weight version it generates with now."""

    slot: SlotId
    bucket: Bucket
    cost: ServerLaw
    key: WeightVersion
    #: Requests inside the server, with the context each went in with.
    inside: dict[TrajectoryId, Tokens] = field(default_factory=dict)
    #: Their sum.
    context: Tokens = 0
    #: Requests that wait for this server, in the order they came.
    waiting: dict[TrajectoryId, Request] = field(default_factory=dict)
    queued_context: Tokens = 0
    #: Requests inside and waiting.
    num_requests: int = 0
    #: Seconds a token would take a newcomer, with everybody who is inside or waits.
    next_step_s: Seconds = 0.0
    _ranked: list[tuple[float, int, TrajectoryId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._settle()

    def reprice(self, cost: ServerLaw) -> None:
        """Take newly learned prices of the server."""
        self.cost = cost
        self._settle()

    def _settle(self) -> None:
        kv = self.context + self.queued_context
        self.num_requests = len(self.inside) + len(self.waiting)
        self.next_step_s = self.cost.decode_step_s(self.num_requests + 1, kv)

    @property
    def running(self) -> int:
        """Requests of this run inside the server."""
        return len(self.inside)

    @property
    def load(self) -> float:
        """Requests inside and waiting, over the number of seats."""
        return self.num_requests / self.bucket.max_num_seqs

    @property
    def has_seat(self) -> bool:
        """Whether one more request may enter, by number."""
        return len(self.inside) < self.bucket.max_num_seqs

    def holds_prefix_of(self, request: Request) -> bool:
        """Whether the server has computed the request's context, with weights that it may use."""
        key = kv_key(self.key, request.kv_since)
        return self.slot == request.last_slot and key == request.last_key

    def enqueue(self, request: Request, rank: float, order: int) -> None:
        """Put a request in the queue; lower ranks leave first."""
        self.waiting[request.trajectory] = request
        self.queued_context += request.context
        heappush(self._ranked, (rank, order, request.trajectory))
        self._settle()

    def head(self) -> Request | None:
        """The request that leaves next: the first in rank."""
        return self.waiting[self._ranked[0][2]] if self.waiting else None

    def dequeue(self, trajectory: TrajectoryId) -> None:
        self._take(trajectory)
        self._settle()

    def _take(self, trajectory: TrajectoryId) -> None:
        self.queued_context -= self.waiting.pop(trajectory).context
        # At once: it may come back with another rank before anybody asks who is first.
        while self._ranked and self._ranked[0][2] not in self.waiting:
            heappop(self._ranked)

    def enter(self, request: Request) -> None:
        """The request goes into the server, out of this queue or another."""
        self.inside[request.trajectory] = request.context
        self.context += request.context
        if request.trajectory in self.waiting:
            self._take(request.trajectory)  # what a newcomer would find stays the same
        else:
            self._settle()

    def leave(self, trajectory: TrajectoryId) -> None:
        """Take a trajectory out whose turn is over."""
        self.context -= self.inside.pop(trajectory)
        self._settle()


class ServerQueues:
    """The routable servers, in plan order and by bucket, short buckets first.

    ``newest`` are those that generate with the version ``latest``. A trajectory begins only there:
    its age counts from its oldest token, and one that began a moment before its server was synced
    would be a version older than the batch it was opened for.
    """

    def __init__(
        self, queues: Iterable[ServerQueue] = (), latest: WeightVersion | None = None
    ) -> None:
        self.by_slot = {queue.slot: queue for queue in queues}
        self.all = tuple(self.by_slot.values())
        self.bounds = sorted({queue.bucket.up_to_tokens for queue in self.all})
        self.buckets = tuple(
            tuple(queue for queue in self.all if queue.bucket.up_to_tokens == bound)
            for bound in self.bounds
        )
        #: All seats of all queues.
        self.seats = sum(queue.bucket.max_num_seqs for queue in self.all)
        newest = [queue for queue in self.all if queue.key == latest]
        self.newest = (
            self if latest is None or len(newest) == len(self.all) else ServerQueues(newest)
        )

    def __iter__(self) -> Iterator[ServerQueue]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)
