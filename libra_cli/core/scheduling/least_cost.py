"""C-MLFQ: libra's own placement, decided anew at every tool return.

A request's **cost** on a server is the time it would take there plus the time it would take from
the others there, in seconds summed over everybody::

    cost(s) = n x step(s)                      its own tokens, at the pace of that server
            + n x company x (b + c x context)  what its presence adds to every step of the others
            + wait(s)                          until a seat or KV is free
            + recompute(s) x (1 + company)     its context, where no prefix cache holds it

``n`` are the tokens it has left, ``company`` the requests inside and waiting, ``b`` and ``c`` are
prices of a decode step there (``pricing.server_costs``), and recompute is 0 where its KV is held.
The step time is linear in the tokens, so summing over the bins of the estimate comes to using its
mean; the distribution matters for fit: a server whose KV cache is too small for what the request
may grow to (its 90th percentile) is only taken if all are. The cheapest server wins. Staying costs
no movement, so a request moves exactly when the gain exceeds the cost of moving, and only at a tool
return, when its KV is idle. Buckets need no bounds here: long remainders find the servers with the
short step worth the way, short ones do not.

**Admission.** A server takes no more than its seats and no more context than its KV cache holds, so
vLLM never preempts. **Order.** Older groups first, since the next batch is made of them and what
gets too old is played again; in a group, the longest expected first. **Aging:** see
``lanes.PATIENCE_S``.

Guarantee: with one server nothing changes but the order; a wrong estimate costs time, never a
token. Limit: greedy, one request at a time; it assumes the load stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from libra_cli.core.scheduling.baseline_estimators import PaperTree, SiblingMean
from libra_cli.core.scheduling.baselines import (
    AttainedService,
    DynaRL,
    Heddle,
    LeastLoaded,
    PaperCmlfq,
    Predicted,
    RoundRobin,
    SchedulingPolicy,
    StickyLeastLoaded,
)
from libra_cli.core.scheduling.causal_estimator import CausalEstimator
from libra_cli.core.scheduling.estimates import Estimator
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens

KV_SHARE = 0.95
"""Of a server's KV cache that may be given out: the rest is what turns under way still add."""
PLAY_SHARE = 0.5
"""Share of all KV caches that trajectories in play may be expected to fill; chosen."""
TURN_TOKENS: Tokens = 256
"""A turn's expected tokens before the trajectory has had one."""


class LeastExpectedCost:
    """Least expected cost; see the module."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator: Estimator | None = estimator

    def choose(self, request: Request, lanes: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The cheapest of the server it was on and the fastest of each bucket."""
        last = lanes.by_slot.get(request.last_slot or "")
        best = last
        least = self.cost(request, last) if last is not None else float("inf")
        for bucket in lanes.buckets:
            lane = min(bucket, key=_pace)
            cost = self.cost(request, lane)
            if best is None or cost < least:
                best, least = lane, cost
        return best

    def cost(self, request: Request, lane: ServerQueue) -> Seconds:
        """Seconds the request takes on this server, from itself and from the others there."""
        price, company = lane.cost, lane.company
        left = max(request.estimate.mean, 1.0)
        added = price.sequence_s + price.kv_token_s * request.context
        cost = left * (lane.pace + price.kv_token_s * request.context + company * added)
        cost += self._wait(request, lane)
        if not lane.holds_prefix_of(request):
            cost += price.prefill_s(request.context, 0) * (1 + company)
        if request.context + request.p90 > price.kv_tokens:
            cost += 1e9
        return cost

    def _wait(self, request: Request, lane: ServerQueue) -> Seconds:
        """Until the queue in front has had its turns, by seats and by KV."""
        seats = (lane.company + 1 - lane.bucket.max_num_seqs) / lane.bucket.max_num_seqs
        wanted = lane.context + lane.queued_context + request.context
        room = wanted / (KV_SHARE * lane.cost.kv_tokens) - 1
        return max(0.0, seats, room) * lane.pace * turn_tokens(request)

    def rank(self, request: Request) -> float:
        """Older groups first; in a group, the longest expected first."""
        return request.trajectory.group - 1 + 1 / (1 + request.estimate.mean)

    def admits(self, request: Request, lane: ServerQueue) -> bool:
        """Within the KV budget; an empty server takes anything."""
        wanted = lane.context + request.context + turn_tokens(request)
        return not lane.inside or wanted <= KV_SHARE * lane.cost.kv_tokens

    def has_room(self, contexts: Tokens, lanes: ServerQueues) -> bool:
        """While the servers' KV caches hold the contexts in play."""
        return caches_hold(contexts, lanes)

    def lets_go(
        self, request: Request, home: ServerQueue, thief: ServerQueue, *, now: Seconds
    ) -> bool:
        """Only where it is cheaper."""
        return self.cost(request, thief) < self.cost(request, home)


def caches_hold(contexts: Tokens, lanes: ServerQueues) -> bool:
    """Whether contexts between turns stay cached: what is evicted during a tool call is computed
    again at every turn."""
    return contexts <= PLAY_SHARE * sum(lane.cost.kv_tokens for lane in lanes.all)


def turn_tokens(request: Request) -> float:
    """Tokens the next turn may have: the mean of those before."""
    return request.generated / request.turns if request.turns else TURN_TOKENS


def _pace(lane: ServerQueue) -> Seconds:
    return lane.pace


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name, with a fresh estimator; ``KeyError`` for an unknown one."""
    return _MAKERS[name]()


_MAKERS: dict[str, Callable[[], SchedulingPolicy]] = {
    "libra": lambda: LeastExpectedCost(CausalEstimator()),
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky-least-loaded": StickyLeastLoaded,
    "attained-service": AttainedService,
    "sibling-history": lambda: Predicted(SiblingMean()),
    "dynarl": DynaRL,
    "heddle": lambda: Heddle(CausalEstimator()),
    "cmlfq-published": lambda: PaperCmlfq(PaperTree()),
}
POLICIES = tuple(_MAKERS)
"""By the names a recipe uses; what needs to know true lengths lives in the simulator."""
