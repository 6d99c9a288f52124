"""libra's own policy: C-MLFQ by least expected cost, decided anew at every tool return.

Late binding at tool returns and the sum of expected decode time and movement time are published:
Libra, arXiv 2606.03077. The terms below for what a request costs the *others*, for the context that
must be computed again and for the queue are libra's own.

A request's **cost** on a server is the time it would take there plus the time it would take from
the others there, in seconds summed over everybody::

    cost(s) = n x step(s)                    its own tokens, each a decode step of that server
            + n x r x (b + c x context)      what its presence adds to every step of the others
            + wait(s)                        until a seat or KV is free
            + recompute(s) x (1 + r)         its context, where no prefix cache holds it

``n`` are the tokens it has left, ``r`` the requests inside and waiting (``num_requests``),
``step(s)`` the seconds of a decode step with one more (``next_step_s``), ``b`` and ``c`` what a
sequence and a token of KV add to it (``core.costs.server``); recompute is 0 where its KV is held.
The step time is linear in the tokens, so summing over the bins of the estimate comes to using its
mean; the distribution matters for fit: a server whose KV cache is too small for what the request
may grow to (its 90th percentile) is only taken if all are. The cheapest server wins. Staying costs
no movement, so a request moves exactly when the gain exceeds the cost of moving, and only at a tool
return, when its KV is idle. Buckets need no bounds here: long remainders find the servers with the
short step worth the way, short ones do not.

**Admission.** A server takes no more than its seats and no more context than its KV cache holds, so
vLLM never preempts. **Order.** Older groups first, since the next batch is made of them and what
gets too old is played again; in a group, the longest expected first. **Aging:** see
``server_queues.STARVATION_LIMIT_S``.

Guarantee: with one server nothing changes but the order; a wrong estimate costs time, never a
token. Limit: greedy, one request at a time; it assumes the load stays as it is.
"""

from __future__ import annotations

from libra_cli.core.scheduling.causal_estimator import CausalEstimator
from libra_cli.core.scheduling.estimates import Estimator
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens

KV_SHARE = 0.95
"""Share of a server's KV cache that admission gives out; turns under way still add to the rest."""
PLAY_SHARE = 0.5
"""Share of all KV caches that trajectories in play may be expected to fill; chosen."""
NEVER_S: Seconds = 1e9
"""Added to the cost of a server that the request may outgrow: more than any time there."""
TURN_TOKENS: Tokens = 256
"""Tokens that a trajectory's first turn is expected to have."""


class LeastExpectedCost:
    """The server of least expected cost; see the module."""

    def __init__(self, estimator: Estimator | None = None) -> None:
        """Without an estimator, it learns with one of its own."""
        self.estimator: Estimator | None = estimator or CausalEstimator()

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The cheapest of the server it was on and the fastest of each bucket."""
        last = queues.by_slot.get(request.last_slot or "")
        best = last
        least = self.cost(request, last) if last is not None else float("inf")
        for bucket in queues.buckets:
            queue = min(bucket, key=_next_step_s)
            cost = self.cost(request, queue)
            if best is None or cost < least:
                best, least = queue, cost
        return best

    def cost(self, request: Request, queue: ServerQueue) -> Seconds:
        """Seconds the request takes on this server, from itself and from the others there."""
        price, num_requests = queue.cost, queue.num_requests
        left = max(request.estimate.mean, 1.0)
        context_s = price.kv_token_s * request.context
        added_s = price.sequence_s + context_s
        cost = left * (queue.next_step_s + context_s + num_requests * added_s)
        cost += self._wait(request, queue)
        if not queue.holds_prefix_of(request):
            cost += price.prefill_s(request.context, 0) * (1 + num_requests)
        if request.context + request.p90 > price.kv_tokens:
            cost += NEVER_S
        return cost

    def _wait(self, request: Request, queue: ServerQueue) -> Seconds:
        """Until the queue in front has had its turns, by seats and by KV."""
        seats = (queue.num_requests + 1 - queue.bucket.max_num_seqs) / queue.bucket.max_num_seqs
        wanted = queue.context + queue.queued_context + request.context
        room = wanted / (KV_SHARE * queue.cost.kv_tokens) - 1
        return max(0.0, seats, room) * queue.next_step_s * turn_tokens(request)

    def rank(self, request: Request) -> float:
        """Older groups first; in a group, the longest expected first."""
        return request.trajectory.group - 1 + 1 / (1 + request.estimate.mean)

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        """Within the KV budget; an empty server takes anything."""
        wanted = queue.context + request.context + turn_tokens(request)
        return not queue.inside or wanted <= KV_SHARE * queue.cost.kv_tokens

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """While the servers' KV caches hold the contexts in play."""
        return caches_hold(contexts, queues)

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        """If the idle server is the cheaper one."""
        return self.cost(request, idle) < self.cost(request, queued)


def caches_hold(contexts: Tokens, queues: ServerQueues) -> bool:
    """Whether contexts between turns stay cached: what is evicted during a tool call is computed
    again at every turn."""
    return contexts <= PLAY_SHARE * sum(queue.cost.kv_tokens for queue in queues.all)


def turn_tokens(request: Request) -> float:
    """Tokens the next turn may have: the mean of those before."""
    return request.generated / request.turns if request.turns else TURN_TOKENS


def _next_step_s(queue: ServerQueue) -> Seconds:
    return queue.next_step_s
