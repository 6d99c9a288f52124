"""libra's scheduler with one part removed, and two baselines with one part of it, by name."""

from __future__ import annotations

from collections.abc import Callable

from libra_cli.core.scheduling.baseline_estimators import TurnIndexMean
from libra_cli.core.scheduling.baselines import LeastLoaded, StickyLeastLoaded, stay_or_least
from libra_cli.core.scheduling.causal_estimator import CausalEstimator
from libra_cli.core.scheduling.least_cost import LeastExpectedCost, caches_hold
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens


class _NoAdmission(LeastExpectedCost):
    """A free seat is enough to be admitted; vLLM preempts when its cache is full."""

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        """Whether a request is admitted: always."""
        return True


class _NoBackPressure(LeastExpectedCost):
    """More trajectories begin while there are seats."""

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Whether more trajectories may begin: always."""
        return True


class _NoMoves(LeastExpectedCost):
    """A trajectory ends where it began."""

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The server the trajectory was on, if it still serves; else the cheapest."""
        last = queues.by_slot.get(request.last_slot or "")
        return last or super().choose(request, queues, now=now)

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        """Whether an idle server may take the request: only one that has not begun."""
        return not request.turns and super().allow_steal(request, queued, idle, now=now)


class _NoCosts(LeastExpectedCost):
    """Placement by seats: the server it was on, else the least loaded."""

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The server it was on while that has a seat, else the least loaded, whatever it costs."""
        return stay_or_least(request, queues, queues.all)


class _NoOrder(LeastExpectedCost):
    """First come, first served in every queue."""

    def rank(self, request: Request) -> float:
        """The place in a queue: the same for all."""
        return 0.0


class _LeastLoadedHeldBack(LeastLoaded):
    """The baseline, with libra's back-pressure."""

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Whether more may begin, by libra's rule."""
        return caches_hold(contexts, queues)


class _StickyHeldBack(StickyLeastLoaded):
    """The baseline, with libra's back-pressure."""

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Whether more may begin, by libra's rule."""
        return caches_hold(contexts, queues)


ABLATIONS: dict[str, Callable[[], SchedulingPolicy]] = {
    "no estimates": lambda: LeastExpectedCost(TurnIndexMean()),
    "no expected cost": lambda: _NoCosts(CausalEstimator()),
    "no KV admission": lambda: _NoAdmission(CausalEstimator()),
    "no back-pressure": lambda: _NoBackPressure(CausalEstimator()),
    "no moves": lambda: _NoMoves(CausalEstimator()),
    "least-loaded, held back": _LeastLoadedHeldBack,
    "sticky, held back": _StickyHeldBack,
    "no order": lambda: _NoOrder(CausalEstimator()),
}
