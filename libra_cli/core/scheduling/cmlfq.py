"""A causality-driven multi-level feedback queue (C-MLFQ), with libra's costs and admission.

Published: Libra, arXiv 2606.03077. The **levels** are the buckets of servers, ordered by the work
left that each is meant for (``up_to_tokens``). Everything starts on the level for the least work.
After every tool return a trajectory is **demoted** to a level for more work, or **promoted** to one
for less, as what its tools returned, and what it has generated, say of the tokens it has left: both
the mean and the P90 of the causal tree (``causal_tree``) must agree to it. Where a level's servers
cannot hold its context, it goes to the next.

A turn goes to the server of its level that costs least, unless it costs less to stay where its
prefix is cached: so a new level is where a trajectory may move to, and it moves when that pays.
Costs, order, admission by KV cache and back-pressure are libra's (``least_cost``). A server with a
free seat and nothing that waits takes over what waits for another, where that costs less, so no
level is idle while another is full.

Guarantee: where servers are alike there is one level, and the policy decides as ``libra`` does.
Limit: nothing moves within a turn, so a trajectory of one long turn stays where it started.
"""

from __future__ import annotations

from libra_cli.core.scheduling.causal_tree import CausalTree
from libra_cli.core.scheduling.least_cost import LeastExpectedCost
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds


class Cmlfq(LeastExpectedCost):
    """The cheapest server of the level of what a trajectory has left; see the module."""

    def __init__(self, tree: CausalTree | None = None) -> None:
        """``tree`` is one of other limits, or of other evidence; a fresh one without."""
        self.tree = CausalTree() if tree is None else tree
        self.estimator = self.tree

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """Return the cheaper of the fastest of its level and the server of the last turn."""
        if len(queues.buckets) < 2:
            return super().choose(request, queues, now=now)
        level = self.level(request, queues)
        while level + 1 < len(queues.buckets) and self.outgrows(request, queues.buckets[level][0]):
            level += 1
        last = queues.by_slot.get(request.last_slot or "")
        return self.cheapest(request, last, queues.buckets[level : level + 1])

    def level(self, request: Request, queues: ServerQueues) -> int:
        """The index of the level that the request belongs on, the shortest work first."""
        if not request.turns:
            return 0
        return self.tree.level(request.trajectory, queues.bounds[:-1])
