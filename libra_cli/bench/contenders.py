"""Every policy that the experiments compare, by name: more than a recipe may choose.

    NAME+admission    a baseline with libra's admission by KV cache and its back-pressure
    ABLATIONS         libra's scheduler with one part removed or replaced
    ORACLES           policies that read the recorded future, on purpose; nothing else does

On unlike servers ``known-levels`` is ``cmlfq`` told the tokens that each trajectory has left: it is
on the level of these from its start on. ``attained levels`` and ``no tool signals`` are ``cmlfq``
by the tokens generated so far, and by the causal tree without what tools return.

``known-lengths`` is libra's own policy told the tokens that each trajectory has left: its next
turn is at most those, and in a group the longest goes first. ``whole-remainder`` is told the same
and judges a placement by all of them. ``known-bucket`` is told them and keeps each trajectory in
the bucket that the planner's table means it for, on the cheapest server there. None is a bound:
``bounds`` has that.

StreamRL's ranker (arXiv 2504.15930) recognises a trajectory of the longest fifth with the published
recall, and calls as many others long by mistake as keeps its fifth a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from libra_cli.core.scheduling.baselines import LONG_SHARE, StreamRL, stay_or_least
from libra_cli.core.scheduling.causal_tree import CausalTree
from libra_cli.core.scheduling.cmlfq import Cmlfq
from libra_cli.core.scheduling.estimators import Estimator, bucket_of
from libra_cli.core.scheduling.least_cost import LeastExpectedCost, caches_hold, fits_kv
from libra_cli.core.scheduling.policy import POLICIES as SCHEDULING_POLICIES
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Seconds, Tokens, ToolReturn, TrajectoryId
from libra_cli.plugins.finding import available, find
from libra_cli.sim.traces import RecordedEpisode, Trace

ADMISSION = "+admission"
"""The end of a policy's name that has libra's admission."""
CONSTANT_TOKENS = 300
"""The horizon of ``constant``; chosen, of 100, 300 and 1,000 the best on the shipped traces."""
RECALL = 0.87
"""Share of the longest trajectories that StreamRL's ranker finds."""


class Future:
    """The recorded future, asked of the simulated world once there is one."""

    def __init__(self) -> None:
        self.episode: Callable[[TrajectoryId], RecordedEpisode] | None = None

    def generated(self, trajectory: TrajectoryId) -> Tokens:
        """Tokens the trajectory will have generated at its end."""
        assert self.episode is not None, "no world has been connected"
        return self.episode(trajectory).generated


# -- what reads the future -----------------------------------------------------------------------


class _KnownLengths(LeastExpectedCost):
    """libra's policy, told the tokens that every trajectory has left."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def left(self, request: Request) -> float:
        """Tokens that the trajectory has yet to generate; at least one."""
        return max(1.0, self._future.generated(request.trajectory) - request.generated)

    def horizon(self, request: Request) -> float:
        """The next turn, or what is left if that is less."""
        return min(super().horizon(request), self.left(request))

    def rank(self, request: Request) -> float:
        """Older groups first; in a group, the longest."""
        return super().rank(request) + 1 / (1 + self.left(request))


class _WholeRemainder(_KnownLengths):
    """The same, as if the load stayed as it is until the trajectory ends."""

    def horizon(self, request: Request) -> float:
        """All tokens that the trajectory is expected to generate yet."""
        return self.left(request)


class _KnownLevels(Cmlfq):
    """C-MLFQ, told the tokens that every trajectory has left."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future

    def level(self, request: Request, queues: ServerQueues) -> int:
        """The level of the tokens that the trajectory has yet to generate."""
        left = self._future.generated(request.trajectory) - request.generated
        return bucket_of(left, queues.bounds[:-1])


class _KnownBucket(_KnownLengths):
    """The same on the servers of the trajectory's bucket alone, by all tokens it will generate."""

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        """The cheapest server of the first bucket that is meant for so long a trajectory."""
        longest = self._future.generated(request.trajectory)
        meant = (bucket for bucket in queues.buckets if bucket[0].bucket.up_to_tokens >= longest)
        servers = next(meant, queues.all)
        return min(servers, key=lambda queue: self.cost(request, queue), default=None)

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        """Whether the idle server is the cheaper one, of the same bucket."""
        alike = queued.bucket.up_to_tokens == idle.bucket.up_to_tokens
        return alike and super().allow_steal(request, queued, idle, now=now)


def _streamrl(future: Future, trace: Trace, seed: int) -> SchedulingPolicy:
    lengths = sorted(episode.generated for episode in trace.episodes)
    bound = lengths[int((1 - LONG_SHARE) * (len(lengths) - 1))]
    mistaken = LONG_SHARE * (1 - RECALL) / (1 - LONG_SHARE)

    def is_long(who: TrajectoryId) -> bool:
        luck = Random(f"{seed}/{who.group}/{who.member}").random()
        return luck < (RECALL if future.generated(who) > bound else mistaken)

    long, short = (lengths[int(share * (len(lengths) - 1))] for share in (0.9, 0.5))
    return StreamRL(is_long, long=long, short=short)


ORACLES: dict[str, Callable[[Future, Trace, int], SchedulingPolicy]] = {
    "streamrl": _streamrl,
    "known-levels": lambda future, _trace, _seed: _KnownLevels(future),
    "known-lengths": lambda future, _trace, _seed: _KnownLengths(future),
    "whole-remainder": lambda future, _trace, _seed: _WholeRemainder(future),
    "known-bucket": lambda future, _trace, _seed: _KnownBucket(future),
}


# -- what is left of libra -----------------------------------------------------------------------


class _Constant(LeastExpectedCost):
    """Least expected cost with the same horizon for every request."""

    def horizon(self, request: Request) -> float:
        """The same number of tokens for every trajectory."""
        return CONSTANT_TOKENS


class _NoAdmission(LeastExpectedCost):
    """A free seat is enough to be admitted; vLLM preempts when its cache is full."""

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        return True


class _NoBackPressure(LeastExpectedCost):
    """Least expected cost with more trajectories begun whenever there are seats."""

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        return True


class _NoMoves(LeastExpectedCost):
    """Least expected cost, but a trajectory ends where it began."""

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
    """Least expected cost, with every queue in the order requests came."""

    def rank(self, request: Request) -> float:
        """The place in a queue: the same for all."""
        return 0.0


class _AttainedLevels(Cmlfq):
    """C-MLFQ by attained service: demoted by the tokens generated so far, never promoted."""

    def level(self, request: Request, queues: ServerQueues) -> int:
        """The level of the tokens that the trajectory has generated."""
        return bucket_of(request.generated, queues.bounds[:-1])


class _NoToolSignals(Cmlfq):
    """C-MLFQ whose tree sees tokens, turns and siblings, and nothing of what tools return."""

    def __init__(self) -> None:
        super().__init__(_DeafTree())


class _DeafTree(CausalTree):
    """The causal tree without what tools return."""

    def returned(
        self, trajectory: TrajectoryId, *, generated: Tokens, returns: Sequence[ToolReturn]
    ) -> float:
        """The mean after as many tokens and turns, whatever was returned."""
        return super().returned(trajectory, generated=generated, returns=())


ABLATIONS: dict[str, Callable[[], SchedulingPolicy]] = {
    "constant": _Constant,
    "no expected cost": _NoCosts,
    "no KV admission": _NoAdmission,
    "no back-pressure": _NoBackPressure,
    "no moves": _NoMoves,
    "no order": _NoOrder,
    "attained levels": _AttainedLevels,
    "no tool signals": _NoToolSignals,
}


# -- a rival with libra's admission --------------------------------------------------------------


class _Admitted:
    """A policy that places and orders as it does, and admits and begins as libra does."""

    def __init__(self, inner: SchedulingPolicy) -> None:
        self._inner = inner
        self.estimator: Estimator | None = inner.estimator

    def choose(self, request: Request, queues: ServerQueues, *, now: Seconds) -> ServerQueue | None:
        return self._inner.choose(request, queues, now=now)

    def rank(self, request: Request) -> float:
        return self._inner.rank(request)

    def admits(self, request: Request, queue: ServerQueue) -> bool:
        """Whether the request fits the KV budget, as in libra's policy."""
        return fits_kv(request, queue)

    def allow_steal(
        self, request: Request, queued: ServerQueue, idle: ServerQueue, *, now: Seconds
    ) -> bool:
        return self._inner.allow_steal(request, queued, idle, now=now)

    def has_room(self, contexts: Tokens, queues: ServerQueues) -> bool:
        """Whether the KV caches hold the contexts in play, as in libra's policy."""
        return caches_hold(contexts, queues)


_OWN = ("libra", "cmlfq")
_RIVALS = tuple(name for name in (*SCHEDULING_POLICIES.shipped, "streamrl") if name not in _OWN)
POLICIES: tuple[str, ...] = (
    *available(SCHEDULING_POLICIES),
    *(rival + ADMISSION for rival in _RIVALS),
    "constant",
    *ORACLES,
)
"""Names that ``--policies`` may have, beside those of ``ABLATIONS``; all of them if it has none."""


def contender(name: str, future: Future, trace: Trace, seed: int) -> SchedulingPolicy:
    """Return a fresh policy of that name; PluginError if there is none."""
    bare = name.removesuffix(ADMISSION)
    if bare != name:
        return _Admitted(contender(bare, future, trace, seed))
    if bare in ORACLES:
        return ORACLES[bare](future, trace, seed)
    made: SchedulingPolicy = (
        ABLATIONS[bare]() if bare in ABLATIONS else find(SCHEDULING_POLICIES, bare)()
    )
    return made
