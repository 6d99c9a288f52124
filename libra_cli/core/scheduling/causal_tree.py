"""The causal tree: what a tool return says about the tokens that a trajectory has yet to generate.

The tree of tool-return states, and the mean and 90th percentile that must agree before a trajectory
moves, are published: Libra, arXiv 2606.03077. There a path begins at the prompt and goes forward,
and a return that was never seen takes the remainder of an earlier one as it stands, although tokens
were spent since. Here a path begins with what is now and goes back, as a context tree does
(Rissanen, 1983)::

    root > tokens generated (one class a doubling) > turns > tool and outcome > size > state before

so every node holds what remained at returns *like this one*, and nothing has been spent since. With
``c`` the observations of a node by class of remaining tokens, ``n`` their number, and ``f`` the
share that is not forgotten, a node says::

    p(node) = (f x c + KAPPA x p(parent)) / (f x n + KAPPA),    f = 2 ** -(age / HALF_LIFE)

where ``age`` counts the trajectories that have finished since. The prompt counts through the
group: each finished sibling that had generated more than this trajectory has is an observation of
what it generated beyond, against ``SIBLING_KAPPA`` that the tree's answer is worth.

Guarantees: an answer depends only on calls made before it, and never on a hash; at most ``cap``
nodes exist, those used longest ago go first and a node never before its children. Limits: a
trajectory that is given up teaches nothing, and those that finish early in a run are the short
ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2
from typing import NamedTuple, TypeAlias

from libra_cli.core.scheduling.estimators import GUESS, IDLE_GROUPS, bucket_of, state_of
from libra_cli.core.types import GroupId, Tokens, ToolReturn, TrajectoryId

EDGES = tuple(round(16 * 2 ** (at / 2)) for at in range(27))
"""Upper edges of the classes of remaining tokens, two a doubling, from 16 to 131,072; beyond the
last is one class more."""
KAPPA = 16.0
"""Observations that a parent counts for in its child. Chosen, with the order of a path, on traces
that do not ship (SWE-agent, mini-swe-agent, InterCode), where 8 and 32 were as good."""
SIBLING_KAPPA = 2.0
"""Finished siblings that the tree's answer counts for; chosen."""
HALF_LIFE = 4000.0
"""Finished trajectories after which an observation counts half. Chosen: some steps of a run."""
CAP = 20_000
"""Nodes that are kept, of about a kilobyte each. Chosen."""

_Path: TypeAlias = tuple[int | str, ...]


class Remainder(NamedTuple):
    """Tokens yet to be generated: the mean, and what nine of ten stay below."""

    mean: float
    p90: float


@dataclass(slots=True)
class _Evidence:
    """What remained at the returns of one node: their weights by class, and weighted sums.

    All are as they were when ``at`` trajectories had finished, and have faded since.
    """

    at: int
    counts: list[float] = field(default_factory=lambda: [0.0] * (len(EDGES) + 1))
    number: float = 0.0
    tokens: float = 0.0

    def add(self, remaining: float, now: int, half_life: float) -> None:
        kept = 0.5 ** ((now - self.at) / half_life)
        if kept < 1.0:
            self.at = now
            self.counts = [kept * count for count in self.counts]
            self.number *= kept
            self.tokens *= kept
        self.counts[bisect_left(EDGES, remaining)] += 1.0
        self.number += 1.0
        self.tokens += remaining


@dataclass(slots=True)
class _Mixture:
    """A distribution over the classes that sums to 1, and its mean in tokens."""

    shares: list[float]
    mean: float

    def take(
        self, counts: Sequence[float], number: float, tokens: float, *, kept: float, kappa: float
    ) -> None:
        """Take in observations, this distribution counting as ``kappa`` of them."""
        whole = kept * number + kappa
        mine, theirs = kappa / whole, kept / whole
        self.shares = [mine * p + theirs * c for p, c in zip(self.shares, counts, strict=True)]
        self.mean = mine * self.mean + theirs * tokens

    def p90(self) -> float:
        """The 90th percentile, evenly spread within its class; infinite in the last."""
        sums = list(accumulate(self.shares))
        at = bisect_left(sums, 0.9)
        if at >= len(EDGES):
            return inf
        low, below = (EDGES[at - 1], sums[at - 1]) if at else (0, 0.0)
        return low + (EDGES[at] - low) * (0.9 - below) / (sums[at] - below)


@dataclass(slots=True)
class _UnderWay:
    """A trajectory that has not ended: where its turns began, and what is expected now.

    ``level`` is the level of the feedback queue that it is on, from 0 for the least work left.
    """

    marks: list[tuple[Tokens, _Path]] = field(default_factory=list)
    state: str = ""
    left: Remainder | None = None
    level: int = 0


class CausalTree:
    """See the module for the law."""

    def __init__(self, *, half_life: float = HALF_LIFE, cap: int = CAP) -> None:
        """``half_life`` in finished trajectories, ``cap`` in nodes."""
        self._half_life = half_life
        self._cap = cap
        #: In the order of their last use; a node's path begins with those of its parents.
        self._nodes: dict[_Path, _Evidence] = {}
        self._groups: dict[GroupId, list[Tokens]] = {}
        self._under_way: dict[TrajectoryId, _UnderWay] = {}
        self._finished = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def begin(self, trajectory: TrajectoryId) -> float:
        """The mean of what trajectories have at their start, or of the siblings."""
        under_way = self._under_way[trajectory] = _UnderWay()
        return self._mark(trajectory, under_way, 0, (0,))

    def returned(
        self, trajectory: TrajectoryId, *, generated: Tokens, returns: Sequence[ToolReturn]
    ) -> float:
        """The mean of what remained at returns like these."""
        under_way = self._under_way[trajectory]
        before, under_way.state = under_way.state, state_of(returns)
        tool, _, rest = under_way.state.rpartition("/")
        kind = f"{tool.rpartition('/')[0]}/{rest}"
        turns = _turn_class(len(under_way.marks))
        path = (generated.bit_length(), turns, kind, under_way.state, before)
        return self._mark(trajectory, under_way, generated, path)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Count what remained at each of its returns, and its length for its siblings."""
        under_way = self._under_way.pop(trajectory)
        for mark, path in under_way.marks:
            self._observe(path, generated - mark)
        siblings = self._groups.pop(trajectory.group, [])
        self._groups[trajectory.group] = [*siblings, generated]
        if len(self._groups) > IDLE_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._finished += 1

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        self._under_way.pop(trajectory, None)

    def level(self, trajectory: TrajectoryId, bounds: Sequence[float]) -> int:
        """The level a trajectory belongs on after its last return, and is on from now.

        ``bounds`` are the upper edges, in tokens left, of all levels but the last. It moves where
        the mean and the P90 of what is left name the same level, and else stays.
        """
        under_way = self._under_way[trajectory]
        if under_way.left is not None:
            mean, p90 = (bucket_of(each, bounds) for each in under_way.left)
            under_way.level = mean if mean == p90 else under_way.level
        return min(under_way.level, len(bounds))

    def _mark(
        self, trajectory: TrajectoryId, under_way: _UnderWay, generated: Tokens, path: _Path
    ) -> float:
        under_way.marks.append((generated, path))
        mixture = self._expected(path, self._beyond(trajectory.group, generated))
        if mixture is None:
            return GUESS
        under_way.left = Remainder(mixture.mean, mixture.p90())
        return mixture.mean

    def _beyond(self, group: GroupId, generated: Tokens) -> list[Tokens]:
        """What the finished siblings generated beyond this many tokens, of those that did."""
        return [whole - generated for whole in self._groups.get(group, ()) if whole > generated]

    def _expected(self, path: _Path, beyond: Sequence[Tokens]) -> _Mixture | None:
        """The distribution at the deepest node of a path; None before anything was observed."""
        known = [node for node in self._used(path) if node is not None]
        if not known:
            return None
        root = known[-1]
        mixture = _Mixture(
            [count / root.number for count in root.counts], root.tokens / root.number
        )
        for node in reversed(known[:-1]):
            kept = 0.5 ** ((self._finished - node.at) / self._half_life)
            mixture.take(node.counts, node.number, node.tokens, kept=kept, kappa=KAPPA)
        if beyond:
            counts = [0.0] * (len(EDGES) + 1)
            for tokens in beyond:
                counts[bisect_left(EDGES, tokens)] += 1.0
            number, tokens = len(beyond), sum(beyond)
            mixture.take(counts, number, tokens, kept=1.0, kappa=SIBLING_KAPPA)
        return mixture

    def _observe(self, path: _Path, remaining: Tokens) -> None:
        for at in range(len(path), -1, -1):
            node = self._nodes.pop(path[:at], None) or _Evidence(self._finished)
            node.add(remaining, self._finished, self._half_life)
            self._nodes[path[:at]] = node
        while len(self._nodes) > self._cap:
            del self._nodes[next(iter(self._nodes))]

    def _used(self, path: _Path) -> Iterator[_Evidence | None]:
        """The nodes of a path, deepest first, each used now: so a parent outlives its children."""
        for at in range(len(path), -1, -1):
            node = self._nodes.pop(path[:at], None)
            if node is not None:
                self._nodes[path[:at]] = node
            yield node


def _turn_class(turns: int) -> int:
    """Up to eight turns one by one, then two classes a doubling."""
    return turns if turns <= 8 else int(2 * log2(turns)) + 3
