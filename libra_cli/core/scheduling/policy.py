"""The seam of scheduling policies: which server a trajectory's next turn queues at, in which order.

The request scheduler asks its policy at every tool return. A policy sees the past of the trajectory
(``Request``) and the servers as ``ServerQueue``; if it brings an estimator along, also what that
expects of the tokens left. It keeps no list of requests and starts nothing. It may hold state of
its own; every run makes a fresh one.

libra's own is in ``least_cost``, the multi-level feedback queue in ``cmlfq``, the baselines that
they are measured against in ``baselines``. To add one: a module with a class that needs no
argument, and an entry point of group ``libra.scheduling_policies`` that names it. A recipe chooses
it with ``scheduler: {policy: NAME}``, and so does ``libra bench schedule --policies NAME``.
"""

from __future__ import annotations

from typing import Protocol

from libra_cli.config.plugins import PluginGroup
from libra_cli.core.scheduling.estimators import Estimator
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens

_HERE = "libra_cli.core.scheduling"

POLICIES = PluginGroup(
    "libra.scheduling_policies",
    "scheduling policy",
    {
        "libra": f"{_HERE}.least_cost:LeastExpectedCost",
        "cmlfq": f"{_HERE}.cmlfq:Cmlfq",
        "round-robin": f"{_HERE}.baselines:RoundRobin",
        "least-loaded": f"{_HERE}.baselines:LeastLoaded",
        "sticky-least-loaded": f"{_HERE}.baselines:StickyLeastLoaded",
        "attained-service": f"{_HERE}.baselines:AttainedService",
        "sibling-history": f"{_HERE}.baselines:SiblingHistory",
        "dynarl": f"{_HERE}.baselines:DynaRL",
        "heddle": f"{_HERE}.baselines:Heddle",
        "cmlfq-published": f"{_HERE}.baselines:PaperCmlfq",
    },
)
"""Policies by the names a recipe uses; what must know true lengths
is in ``libra_cli.bench.contenders``.
"""


class SchedulingPolicy(Protocol):
    """A rule of where a request queues, when it enters a server,
    and which server may take it over.
    """

    estimator: Estimator | None
    """Estimates the tokens that a trajectory has left; None: nothing here reads an estimate."""

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The server to queue at; None only if there is none."""
        ...

    def rank(self, request: Request) -> float:
        """Order within a queue: the smallest leaves first, ties in the order they came."""
        ...

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        """Whether a server with a free seat has room for this request."""
        ...

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        """Whether a request that waits at ``queued`` may enter the server ``idle`` instead."""
        ...

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Back-pressure: whether to begin more while the trajectories in play, between turns too,
        are expected to hold ``contexts`` tokens."""
        ...
