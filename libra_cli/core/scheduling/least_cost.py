"""libra's own policy: least expected cost, decided anew at every tool return.

Late binding at tool returns and the sum of decode time and movement time are published:
Libra, arXiv 2606.03077. The horizon, the terms for what a request costs the *others* and for
the context that must be computed again are libra's own.

A request's **cost** on a server is the time it would take there plus the time it would take from
the others there, in seconds summed over everybody::

    cost(s) = n x step(s)                    its own tokens, each a decode step of that server
            + n x r x (b + c x context)      what its presence adds to every step of the others
            + recompute(s) x (1 + r)         its context, where no prefix cache holds it

``r`` are the requests inside and waiting (``num_requests``), ``step(s)`` the seconds of a decode
step with one more (``next_step_s``), ``b`` and ``c`` what a sequence and a token of KV add to it
(``core.costs.server``); recompute is 0 where its KV is held. The cheapest server wins. Staying
costs no movement, so a request moves exactly when the gain exceeds the cost of moving, and only at
a tool return, when its KV is idle.

**The horizon** ``n`` is the next turn, expected to be as long as its turns have been on average,
and not all that the trajectory has yet to generate: the load does not stay as it is for that long,
and the next tool return is a chance to decide again. That is its only feedback: what a
trajectory has attained says how much a move is worth to it, so what generates much a turn finds the
servers with the short step worth the way, and what calls its tools all the time stays with its
cache. With the whole remainder instead, estimated or known, trajectories moved up to thirty times
as often and runs on alike servers had up to 7 % less throughput (nine traces, 1 to 6 seeds); with
four turns 1 to 3 % less; with two, and with 300 tokens for all, it was level on the shipped traces.

**Fit.** A server whose KV cache is too small for the context and its next turn is only taken if all
are. **Admission.** A server takes no more than its seats and no more context than its KV cache
holds, so vLLM never preempts. **Order.** Older groups first, since the next batch is made of them
and what gets too old is played again. There is no term for the time until a seat is free, and
nobody goes first for having waited long: either made a difference of -1 to 0 % (tau2, taubench and
moatless, under hold and cut, one or two seeds).

Guarantee: with one server nothing changes but the order; a wrong cost takes time, never a token.
Limit: greedy, one request at a time; it assumes the load stays as it is over the horizon.
"""

from __future__ import annotations

from libra_cli.core.scheduling.estimators import Estimator
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens

KV_SHARE = 0.95
"""Share of a server's KV cache that admission gives out; turns under way still add to the rest."""
PLAY_SHARE = 0.5
"""Share of all KV caches that trajectories in play may be expected to fill; chosen."""
NEVER_S: Seconds = 1e9
"""Seconds added to the cost of a server that the request would
outgrow: more than any time there.
"""
TURN_TOKENS: Tokens = 256
"""Tokens that a trajectory's first turn is expected to have."""


class LeastExpectedCost:
    """The server of least expected cost; see the module."""

    estimator: Estimator | None = None

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """Return the cheapest of the candidates; of two that cost the same the first."""
        return min(
            candidates(request, queues), key=lambda one: self.cost(request, one), default=None
        )

    def cost(self, request: Request, queue: ServerQueue) -> Seconds:
        """Seconds the request takes on this server, from itself and from the others there."""
        price, num_requests = queue.cost, queue.num_requests
        ahead = self.horizon(request)
        context_s = price.context_s(request.context)
        added_s = price.sequence_s + context_s
        cost = ahead * (queue.next_step_s + context_s + num_requests * added_s)
        if not queue.holds_prefix_of(request):
            cost += price.prefill_s(request.context, 0) * (1 + num_requests)
        if request.context + ahead > price.kv_tokens:
            cost += NEVER_S
        return cost

    def horizon(self, request: Request) -> float:
        """Tokens that the placement is judged by: the next turn's."""
        return turn_tokens(request)

    def rank(self, request: Request) -> float:
        """Return the number of the request's group, so that older groups come first."""
        return float(request.trajectory.group)

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        """Whether the request fits the KV budget; an empty server takes any request."""
        return fits_kv(request, queue)

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Whether the servers' KV caches hold the contexts in play."""
        return caches_hold(contexts, queues)

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        """Whether the idle server is the cheaper one."""
        return self.cost(request, idle) < self.cost(request, queued)


def candidates(request: Request, queues: ServerQueues) -> list[ServerQueue]:
    """The server of the last turn, and the fastest of each bucket."""
    last = queues.by_slot.get(request.last_slot or "")
    fastest = [min(bucket, key=_next_step_s) for bucket in queues.buckets]
    return fastest if last is None else [last, *(one for one in fastest if one is not last)]


def fits_kv(request: Request, queue: ServerQueue) -> bool:
    """Whether the contexts inside leave room for this request and its next turn; an empty server
    takes any request.
    """
    if not queue.inside:
        return True
    wanted = queue.context + request.context + turn_tokens(request)
    return wanted <= KV_SHARE * queue.cost.kv_tokens


def caches_hold(contexts: Tokens, queues: ServerQueues) -> bool:
    """Whether contexts between turns stay cached: what is evicted during a tool call is computed
    again at every turn."""
    return contexts <= PLAY_SHARE * sum(queue.cost.kv_tokens for queue in queues.all)


def turn_tokens(request: Request) -> float:
    """Tokens the next turn may have: the mean of those before."""
    return max(1.0, request.generated / request.turns) if request.turns else TURN_TOKENS


def _next_step_s(queue: ServerQueue) -> Seconds:
    return queue.next_step_s
