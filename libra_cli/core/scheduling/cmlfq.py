"""A causality-driven multi-level feedback queue (C-MLFQ), with libra's costs and admission.

Published: Libra, arXiv 2606.03077. The **levels** are the buckets of servers, ordered by the work
left that each is meant for (``up_to_tokens``). Everything starts on the level for the least work.
After every tool return a trajectory is **demoted** to a level for more work, or **promoted** to one
for less, as what its tools returned, and what it has generated, say of the tokens it has left: both
the mean and the P90 of the causal tree (``causal_tree``) must agree to it.

Its next turn goes where it costs least (``least_cost``), where a server of another level counts as
``OFF_LEVEL`` times as dear. So a level is where a trajectory is rather sent to, it moves when that
pays for the context to compute again, and no level stays idle while another is crowded. Order,
admission by KV cache and back-pressure are libra's.

Guarantee: where servers are alike there is one level, and the policy decides as ``libra`` does.
Limit: nothing moves within a turn, so a trajectory of one long turn stays where it started.
"""

from __future__ import annotations

from libra_cli.core.scheduling.causal_tree import CausalTree
from libra_cli.core.scheduling.least_cost import LeastExpectedCost, candidates
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds

OFF_LEVEL = 1.3
"""How many times its cost a server of another level counts. Chosen on mint (24 GPUs, hold and cut
at a bound of 1, two seeds): with 2 runs took 4 to 6 % longer, and 1 to 6 % where no other level was
taken at all."""


class Cmlfq(LeastExpectedCost):
    """Least expected cost, rather on the level of what a trajectory has left; see the module."""

    def __init__(self, tree: CausalTree | None = None) -> None:
        """``tree`` is one of other limits, or of other evidence; a fresh one without."""
        self.tree = CausalTree() if tree is None else tree
        self.estimator = self.tree

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """Return the cheapest of the candidates, those of other levels taken as dearer."""
        if len(queues.buckets) < 2:
            return super().choose(request, queues, now=now)
        up_to = queues.bounds[self.level(request, queues)]

        def cost(queue: ServerQueue) -> Seconds:
            dearer = 1.0 if queue.bucket.up_to_tokens == up_to else OFF_LEVEL
            return dearer * self.cost(request, queue)

        return min(candidates(request, queues), key=cost)

    def level(self, request: Request, queues: ServerQueues) -> int:
        """The index of the level that the request belongs on, the shortest work first."""
        if not request.turns:
            return 0
        return self.tree.level(request.trajectory, queues.bounds[:-1])
