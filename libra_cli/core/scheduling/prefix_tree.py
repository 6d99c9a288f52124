"""The causal prefix tree: what a tool return says about the tokens yet to be generated.

The tree of ordered tool-return states is published (Libra, arXiv 2606.03077); shrinking, fading and
censoring are libra's own.

A *state* is one turn's tool return, reduced to tool x payload class x outcome. A *path* is a word
of keys, coarsest first; every node of the tree is a prefix of some path and holds a histogram of
remaining generated tokens over the bins of ``bins.BOUNDS``. An observation counts in every
prefix of its path, so a node is always the union of its children and of what ended there.

The law, for a path k1 k2 ... kn with nodes 0 (the root) to n:

    p_0     = (c_0 + WARM_KAPPA * warm) / (n_0 + WARM_KAPPA)
    p_i     = (c_i + KAPPA * p_(i-1)) / (n_i + KAPPA)
    c_i     = sum over observations of 2 ** -(age / half_life),    n_i = sum of c_i over the bins

where ``age`` counts finished trajectories since, ``warm`` is flat over the logarithm of tokens, and
a node that does not exist has c = n = 0: its estimate is its parent's. One visit therefore moves an
estimate by 1 / (1 + KAPPA) and no more.

The callers' paths start with what is now (the turn, the service attained, the latest state) and go
back in time, rooted globally: nearly every late return would fall off a tree that is read from the
first state on. So a node is a class of *returns*, not of trajectories. Its histogram holds what
remained at such a return; nothing has been spent since, and nothing needs subtracting. What is
rooted per prompt has two homes: a path that begins with the prompt's length, and the siblings of
the group (causal_estimator.py), since no prompt comes again once its group is done.

A censored observation (more than r tokens remained, then nobody looked) is given to the bins from
r's on in proportion to the node's estimate there (Efron's redistribution to the right, 1967,
the histogram form of Kaplan and Meier's estimate, 1958).

Guarantee: estimates sum to 1 and are never 0 in a bin; at most ``cap`` nodes exist below the root,
about 1.3 KB each (three arrays and a dictionary); beyond, the least decayed weights go,
leaves before their parents. Merging a tree into another gives, but for what was evicted, the tree
that had observed both histories, each aged as it was. Limit: a tree knows only what its paths
spell out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any, TypeAlias

import numpy as np

from libra_cli.core.scheduling.bins import BINS, bin_of
from libra_cli.core.types import ToolOutcome, ToolReturn

KAPPA = 16.0
"""Observations a parent counts for in its child; a compromise: with 4, 16 and 64 the log loss of
``libra bench placement`` is 0.269, 0.264, 0.268 on tau2bench, 0.508, 0.511, 0.516 on moatless.
"""
STALE = 0.01
"""Share of its evidence that a node's log odds may lag behind."""
WARM_KAPPA = 64.0
"""Observations the warm prior counts for at the root."""
SIZES = (200, 800, 3200, 12800)
"""Upper edges of the payload classes, in characters."""

SILENT = "-"
"""The state of a turn without a tool call."""

Key: TypeAlias = str | int
Histogram: TypeAlias = list[float]
Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""A number for every bound but the last, or for every bin."""


def log_odds(weights: Vector) -> Vector:
    """Of surviving each bound but the last, for weights that sum to 1."""
    below = np.minimum(np.maximum(weights[:-1].cumsum(), 1e-4), 0.9999)
    odds: Vector = np.log((1.0 - below) / below)
    return odds


def state_of(returns: Sequence[ToolReturn]) -> str:
    """The state a turn's returns make: the last tool, their summed payload, the worst outcome.

    A turn without a tool call has the state ``SILENT``.
    """
    if not returns:
        return SILENT
    last = returns[-1]
    size, outcome = last.size, last.outcome
    if len(returns) > 1:
        size = sum(each.size for each in returns)
        outcome = max((each.outcome for each in returns), key=_BADNESS.__getitem__)
    return f"{last.tool}/{bisect_left(SIZES, size)}/{outcome.value}"


_BADNESS = {ToolOutcome.OK: 0, ToolOutcome.ERROR: 1, ToolOutcome.TIMEOUT: 2}
WARM: Vector = np.full(BINS, 1 / BINS)
"""What is thought before anything was observed: flat over the logarithm of tokens."""


class _Node:
    """``counts`` and their sum ``total`` in the tree's units; ``children`` by key.

    ``shares`` and ``odds`` are what was worked out for it at ``asked``; see ``log_odds``.
    """

    __slots__ = ("asked", "children", "counts", "odds", "shares", "total")

    def __init__(self) -> None:
        self.counts: Vector = np.zeros(BINS)
        self.total = 0.0
        self.shares: Vector = WARM
        self.odds: Vector | None = None
        self.asked = -inf
        self.children: dict[Key, _Node] = {}


class PrefixTree:
    """Histograms of remaining tokens by path. See the module for the law.

    Faded by weighing what is new heavier: ``_unit`` doubles every half-life.
    """

    def __init__(self, *, half_life: float = 4000.0, cap: int = 20_000) -> None:
        """``half_life`` in ticks (finished trajectories); ``cap`` in nodes below the root."""
        self._half_life = half_life
        self._cap = cap
        self._clock = 0.0
        self._unit = 1.0
        self._root = _Node()
        self._nodes = 0

    def __len__(self) -> int:
        return self._nodes

    def tick(self, count: float = 1.0) -> None:
        """Everything observed so far gets older by ``count`` finished trajectories."""
        self._clock += count
        self._unit *= 2 ** min(count / self._half_life, 900.0)
        if self._unit > 1e9:
            self._scale(self._root, 1 / self._unit)
            self._unit = 1.0

    def observe(self, path: Sequence[Key], remaining: float, weight: float = 1.0) -> None:
        """At a return with this path, ``remaining`` tokens were yet to come."""
        place = bin_of(remaining)
        added = weight * self._unit
        for node in self._grown(path):
            node.counts[place] += added
            node.total += added
            if added > STALE * node.total:
                node.asked = -inf

    def observe_censored(self, path: Sequence[Key], beyond: float) -> None:
        """At a return with this path, more than ``beyond`` tokens were yet to come."""
        first = bin_of(beyond)
        tail = np.array(self.estimate(path)[first:])
        tail *= self._unit / tail.sum()
        for node in self._grown(path):
            node.counts[first:] += tail
            node.total += self._unit
            if self._unit > STALE * node.total:
                node.asked = -inf

    def estimate(self, path: Iterable[Key]) -> Histogram:
        """The distribution at the deepest node of the path, shrunk along it; sums to 1."""
        node = self._root
        shares = self._shrunk(node, WARM, WARM_KAPPA)
        for key in path:
            child = node.children.get(key)
            if child is None:
                break
            node = child
            shares = self._shrunk(node, shares, KAPPA)
        histogram: Histogram = shares.tolist()
        return histogram

    def log_odds(self, path: Iterable[Key]) -> Vector:
        """``log_odds`` of the estimate. Not to be changed by the caller.

        What was worked out for a node is used again until the node, or the tree, has seen
        ``STALE`` more of what it had seen: a node's share of an answer lags by a hundredth of its
        evidence, one tick at least.
        """
        node, clock = self._root, self._clock
        late = clock - STALE * clock
        if node.asked < late:
            self._refresh(node, WARM, WARM_KAPPA)
        for key in path:
            child = node.children.get(key)
            if child is None:
                break
            if child.asked < late:
                self._refresh(child, node.shares, KAPPA)
            node = child
        if node.odds is None:
            node.odds = log_odds(node.shares)
        return node.odds

    def _refresh(self, node: _Node, parent: Vector, kappa: float) -> None:
        node.shares, node.odds = self._shrunk(node, parent, kappa), None
        node.asked = self._clock

    def depth(self, path: Iterable[Key]) -> int:
        """How many keys of the path have a node."""
        node, depth = self._root, 0
        for key in path:
            child = node.children.get(key)
            if child is None:
                break
            node, depth = child, depth + 1
        return depth

    def weight(self, path: Iterable[Key]) -> float:
        """Faded observations at the node of exactly this path; 0 without one."""
        node = self._root
        for key in path:
            child = node.children.get(key)
            if child is None:
                return 0.0
            node = child
        return node.total / self._unit

    def _shrunk(self, node: _Node, parent: Vector, kappa: float) -> Vector:
        kappa *= self._unit
        shares: Vector = node.counts + kappa * parent
        shares /= node.total + kappa
        return shares

    def _grown(self, path: Sequence[Key]) -> list[_Node]:
        """The nodes of a path, from the root on; those that were not there are new."""
        if self._nodes + len(path) > self._cap:
            self._evict(len(path))
        node = self._root
        nodes = [node]
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
                self._nodes += 1
            node = child
            nodes.append(node)
        return nodes

    def _scale(self, node: _Node, by: float) -> None:
        node.counts *= by
        node.total *= by
        for child in node.children.values():
            self._scale(child, by)

    def _evict(self, room: int) -> None:
        """Drop the nodes of least weight, leaves first: a sixteenth of the cap, or ``room``."""
        edges = [
            (node.total, -depth, number, parent, key)
            for number, (parent, key, node, depth) in enumerate(self._edges())
        ]
        # A parent weighs no less than its child, so with the depth as the second key a child goes
        # before its parent (but for rounding: hence the recount).
        edges.sort(key=lambda edge: edge[:3])
        keep = max(0, min(self._cap * 15 // 16, self._cap - room))
        for _, _, _, parent, key in edges[: max(0, self._nodes - keep)]:
            parent.children.pop(key, None)
        self._nodes = sum(1 for _ in self._edges())

    def _edges(self) -> Iterator[tuple[_Node, Key, _Node, int]]:
        stack = [(self._root, 1)]
        while stack:
            parent, depth = stack.pop()
            for key, node in parent.children.items():
                yield parent, key, node, depth
                stack.append((node, depth + 1))

    def state(self) -> dict[str, Any]:
        """Everything it knows, as JSON-able values: the counts as they have faded by now."""
        return {"clock": self._clock, "root": self._saved(self._root)}

    def restore(self, state: dict[str, Any]) -> None:
        """Forget everything and know what ``state`` says."""
        self._clock, self._unit = float(state["clock"]), 1.0
        self._root = self._loaded(state["root"])
        self._nodes = sum(1 for _ in self._edges())

    def merge(self, state: dict[str, Any]) -> None:
        """Add another tree's observations, aged as they are there; the clock is not moved."""
        self._join(self._root, self._loaded(state["root"]))
        self._nodes = sum(1 for _ in self._edges())
        if self._nodes > self._cap:
            self._evict(0)

    def _join(self, mine: _Node, theirs: _Node) -> None:
        mine.counts += theirs.counts * self._unit
        mine.total += theirs.total * self._unit
        mine.asked = -inf
        for key, child in theirs.children.items():
            if key not in mine.children:
                mine.children[key] = _Node()
            self._join(mine.children[key], child)

    def _saved(self, node: _Node) -> list[Any]:
        now = (node.counts / self._unit).tolist()
        counts = {str(i): count for i, count in enumerate(now) if count}
        return [counts, [[key, self._saved(child)] for key, child in node.children.items()]]

    def _loaded(self, saved: list[Any]) -> _Node:
        counts, children = saved
        node = _Node()
        for place, count in counts.items():
            node.counts[int(place)] = float(count)
        node.total = float(node.counts.sum())
        node.children = {key: self._loaded(child) for key, child in children}
        return node
