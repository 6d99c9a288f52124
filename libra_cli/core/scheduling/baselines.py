"""The baselines that libra's own policy (``least_cost``) is measured against.

    round-robin           the next server in turn; the queue in front of it is its fate
    least-loaded          any free seat, the emptiest server first
    sticky-least-loaded   where the prefix cache is while there is a seat, else least loaded
    attained-service      classic MLFQ: the bucket of the tokens so far, least served first
    sibling-history       the bucket of what finished siblings suggest is left
    streamrl              the predicted longest fifth on servers of their own, longest first
                          (arXiv 2504.15930)
    dynarl                least loaded; more finished tool calls first (DynaRL, OSDI 2026)
    heddle                longest predicted first, onto the fastest server (Heddle)
    cmlfq-published       up a bucket only if the prefix tree's mean and P90 agree
                          (Libra, arXiv 2606.03077)

Each keeps the rule that is published and nothing else of its system. All but round-robin are
work-conserving: a free server takes what waits for a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra_cli.core.scheduling.estimators import Estimator, PaperTree, SiblingMean, bucket_of
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens, TrajectoryId

LONG_SHARE = 0.2
"""StreamRL (arXiv 2504.15930) calls the longest fifth of a batch
long, and gives it servers of its own.
"""


class LeastLoaded:
    """The server with the smallest share of its seats taken or asked for."""

    def __init__(self, estimator: Estimator | None = None) -> None:
        self.estimator = estimator

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        return least_loaded(queues.all)

    def rank(self, request: Request) -> float:
        """Return 0: requests are served in the order they came."""
        return 0.0

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        """Return True: a seat is enough; vLLM looks after its memory."""
        return True

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        """Return True: any server with a free seat may take the request."""
        return True

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Return True: only seats limit these policies."""
        return True


class RoundRobin(LeastLoaded):
    """Sends each request to the next server in turn."""

    def __init__(self, estimator: Estimator | None = None) -> None:
        super().__init__(estimator)
        self._turn = 0

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The next server in turn, however full it is."""
        self._turn += 1
        return queues.all[self._turn % len(queues)] if queues.all else None

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        return False


class StickyLeastLoaded(LeastLoaded):
    """Sends a request to the server of its last turn while there
    is a seat, else to the least loaded.
    """

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The last server if it has a seat, else the least loaded."""
        return stay(request, queues) or least_loaded(queues.all)


class DynaRL(StickyLeastLoaded):
    """Requests with more finished tool calls go first."""

    def rank(self, request: Request) -> float:
        """Return minus the number of finished tool calls."""
        return -float(request.tools)


class _Bucketed(LeastLoaded):
    """One queue level a bucket: the least loaded server of the bucket that a rule names."""

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """Return the last server if it is of the request's bucket and
        has a seat, else the least loaded.
        """
        if not queues.all:
            return None
        return stay_or_least(request, queues, queues.buckets[self.level(request, queues.bounds)])

    def level(self, request: Request, bounds: Sequence[int]) -> int:
        """Return the index of the request's bucket, shortest first."""
        raise NotImplementedError


class AttainedService(_Bucketed):
    """Classic MLFQ: every trajectory starts in the short bucket and sinks as it is served."""

    def level(self, request: Request, bounds: Sequence[int]) -> int:
        """The bucket of the tokens generated so far."""
        return bucket_of(request.generated, bounds[:-1])

    def rank(self, request: Request) -> float:
        """Return the generated tokens: the least served first."""
        return float(request.generated)


class SiblingHistory(_Bucketed):
    """The bucket of what the finished trajectories of the group suggest is left."""

    def __init__(self) -> None:
        super().__init__(SiblingMean())

    def level(self, request: Request, bounds: Sequence[int]) -> int:
        """The bucket of the mean of what is left."""
        return bucket_of(request.expected, bounds[:-1])


class PaperCmlfq(LeastLoaded):
    """The published rule: move only if the prefix tree's mean and P90 name the same bucket."""

    def __init__(self) -> None:
        self._tree = PaperTree()
        super().__init__(self._tree)

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The bucket both agree on, else the one it was in; everything starts in the shortest."""
        if not queues.all:
            return None
        agreed = self._tree.agrees(request.trajectory, queues.bounds[:-1])
        last = queues.by_slot.get(request.last_slot or "")
        if agreed is None and last is not None:
            agreed = queues.bounds.index(last.bucket.up_to_tokens)
        return stay_or_least(request, queues, queues.buckets[agreed or 0])


class Heddle(LeastLoaded):
    """Longest predicted first, each onto the server that is fastest for one sequence."""

    def __init__(self) -> None:
        super().__init__(SiblingMean())

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """Stay put; at first the long go to the fast servers in proportion to their speed."""
        return stay(request, queues) or min(queues.all, key=_next_step_s, default=None)

    def rank(self, request: Request) -> float:
        """Return minus the predicted tokens left."""
        return -request.expected


class StreamRL(LeastLoaded):
    """The predicted longest fifth get servers of their own, longest first within.

    ``is_long`` is the verdict of a ranker model on a trajectory when it begins; ``long`` and
    ``short`` (P90 and P50 lengths, as published) stand for the two groups. The dedicated servers
    are the last of the list, in proportion to the tokens the group is expected to want.
    """

    def __init__(
        self, is_long: Callable[[TrajectoryId], bool], *, long: Tokens, short: Tokens
    ) -> None:
        super().__init__()
        self._is_long = is_long
        wanted = LONG_SHARE * long
        self._share = wanted / (wanted + (1 - LONG_SHARE) * short)
        self._expected = {True: long, False: short}

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """Return the last server if it is of the group's and has a
        seat, else the group's least loaded.
        """
        dedicated = min(max(1, round(len(queues) * self._share)), max(len(queues) - 1, 0))
        cut = len(queues) - dedicated
        mine = queues.all[cut:] if self._is_long(request.trajectory) else queues.all[:cut]
        return stay_or_least(request, queues, mine or queues.all)

    def rank(self, request: Request) -> float:
        """Return minus the tokens left by the mean length of the
        trajectory's class: longest first.
        """
        return float(request.generated - self._expected[self._is_long(request.trajectory)])


def stay(request: Request, queues: ServerQueues) -> ServerQueue | None:
    """Return the server of the last turn, if it still serves and has a free seat."""
    queue = queues.by_slot.get(request.last_slot or "")
    return queue if queue is not None and queue.has_seat else None


def stay_or_least(
    request: Request, queues: ServerQueues, mine: Sequence[ServerQueue]
) -> ServerQueue | None:
    """The server of the last turn if it is one of ``mine`` with a seat, else their emptiest."""
    held = stay(request, queues)
    return held if held is not None and held in mine else least_loaded(mine)


def least_loaded(queues: Sequence[ServerQueue]) -> ServerQueue | None:
    """Return the server with the smallest load; ties go to the first."""
    return min(queues, key=_load, default=None)


def _load(queue: ServerQueue) -> float:
    return queue.load


def _next_step_s(queue: ServerQueue) -> Seconds:
    return queue.next_step_s
