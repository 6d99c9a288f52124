"""libra's own estimator of what a trajectory has yet to generate, learned while the run goes on.

The idea of a causal prefix tree over tool returns is published (Libra, arXiv 2606.03077); the law
below, which joins five paths of it with the siblings, is libra's own.

The law of ``CausalEstimator``. At a return, with ``S_v(b)`` the probability of view ``v`` that more
than ``b`` tokens remain (``b`` runs over ``BOUNDS``) and ``S_0`` that of every return there was:

    logit S(b) = logit S_0(b) + sum over views of  w_v * (logit S_v(b) - logit S_0(b))

Five views are paths in the prefix tree, which shrinks where it is thin: what the latest tools
returned, at this turn; service attained, by turn; context, by service attained; the prompt's
length, by service attained; the latest turn's tokens, by service attained. The sixth is the
siblings. Were the lengths of one group Weibull with shape 2 and unknown scale (gamma prior, worth
``SIBLING_KAPPA`` siblings of average length), then with ``n`` siblings finished, ``X`` the sum of
the squared tokens of *all* siblings so far (finished and not: that is what makes an unfinished one
a censored observation and not a missing one) and ``a`` the tokens of this one,

    S_siblings(b) = ((x + X + a^2) / (x + X + (a + b)^2)) ** (SIBLING_KAPPA + n),
    x = SIBLING_KAPPA * mean square,

and the view is what this adds over ``n = X = 0``. The weights ``w >= 0`` start equal and follow
the gradient of the log loss at every bound, by AdaGrad (Duchi, Hazan and Singer, 2011), whenever a
trajectory finishes (or is withdrawn: at the bounds it had passed); after ``EAGER`` of them, on
every fourth. That one weight serves every bound keeps S falling in b.

Those that finish early in a run are the short ones. So the result is tilted: a person-time table
(ends and passages per bin of total length, fading together) gives the length distribution with
those under way counted as what they are, and every total is weighted by its share there over its
share among the finished. In a long steady run the tilt is 1. A withdrawn trajectory is censored in
the table and in the tree alike.

Guarantees: an answer depends only on calls made before it; weights of an answer are positive and
sum to 1; memory is bounded by the tree's cap, ``IDLE_GROUPS``, and for each trajectory under way
32 bytes a return plus a reference to a shared string. Limit: six numbers are learned for all
trajectories together, so a view that matters for one kind of task only is weighted by its average.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log2, sqrt
from typing import Any

import numpy as np

from libra_cli.core.scheduling.bins import BINS, BOUNDS, bin_of
from libra_cli.core.scheduling.estimates import MIDDLES, Estimate
from libra_cli.core.scheduling.length_table import LengthTable
from libra_cli.core.scheduling.prefix_tree import SILENT, Key, PrefixTree, Vector, state_of
from libra_cli.core.types import GroupId, Tokens, ToolReturn, TrajectoryId

EDGES = np.array(BOUNDS[:-1])
"""The bounds that something may lie above, in tokens; shape (BINS - 1,), as every log odds here."""
CENTRES = np.array(MIDDLES)
"""What a trajectory of a bin counts for, in tokens; shape (BINS,)."""
VIEWS = ("now", "age", "context", "prompt", "turn", "siblings")
"""What an estimate joins; see the law."""
WEIGHT = 0.24
"""Each view's weight to start with. Chosen; a run soon replaces it by what it learns: with half or
twice as much at most 0.6 % of the placements on tau2bench and moatless change."""
SIBLING_WEIGHT = 0.5
"""The siblings' weight to start with; chosen, and replaced in the same way."""
RATE = 0.1
"""AdaGrad's step size."""
SIBLING_KAPPA = 2.0
"""Siblings of average length that the prior of the sixth view is worth."""
SURE = 1e-4
"""Probabilities below this count as this, so that their log odds stay finite."""
TRIFLE = 0.05
"""A view of less weight is left out of an answer, to save its time."""
EAGER = 512
"""Trajectories after which the weights learn from every fourth only."""
LESSONS = 8
"""Returns of one trajectory that the weights learn from."""
IDLE_GROUPS = 4096
"""Groups with nothing under way that are remembered."""
TOOLED = -1
"""The key, in the tree's root, of the node of every return of a tool."""


class _Group:
    """``ended`` siblings, the squares of their tokens, and of those of the ``active`` so far."""

    __slots__ = ("active", "ended", "squares")

    def __init__(self) -> None:
        self.active = 0
        self.ended = 0
        self.squares = 0.0


class _TrackedTrajectory:
    """One trajectory under way.

    ``marks`` holds ``MARKS`` numbers a return, ``prompt`` the class of its length (an eighth of a
    doubling), ``attained`` the tokens generated up to the latest return.
    """

    __slots__ = ("attained", "group", "marks", "prompt", "states")

    def __init__(self, group: _Group, prompt: Tokens) -> None:
        self.group = group
        self.prompt = int(8 * log2(max(prompt, 1)))
        self.attained = 0
        self.states: list[str] = []
        self.marks: array[float] = array("d")


MARKS = 4
"""Per return: generated, context, siblings ended, squares of the siblings' tokens."""


class CausalEstimator:
    """libra's own; the module states its law."""

    def __init__(self, *, half_life: float = 4000.0, cap: int = 20_000) -> None:
        """``half_life`` in finished trajectories; ``cap`` in nodes of the tree."""
        self._tree = PrefixTree(half_life=half_life, cap=cap)
        self._starts = PrefixTree(half_life=half_life, cap=256)
        self._lengths = LengthTable(half_life)
        self._weights = [*[WEIGHT] * (len(VIEWS) - 1), SIBLING_WEIGHT]
        self._slopes = [0.01] * len(VIEWS)
        self._count = 0
        self._active: dict[TrajectoryId, _TrackedTrajectory] = {}
        self._groups: dict[GroupId, _Group] = {}

    @property
    def prior(self) -> Estimate:
        """What remains at any tool return."""
        return Estimate.of(self._tree.estimate((TOOLED,)))

    @property
    def weights(self) -> dict[str, float]:
        """What each view counts for now."""
        return dict(zip(VIEWS, self._weights, strict=True))

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """See the protocol."""
        tracked = self._tracked(trajectory, prompt)
        return self._tilted(np.array(self._starts.estimate((tracked.prompt,))), 0)

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """See the protocol. One that never began begins here."""
        tracked = self._tracked(trajectory, context - generated)
        group, before = tracked.group, tracked.attained
        tracked.states.append(state_of(returns))
        others = group.squares - before * before
        tracked.marks.extend((generated, context, group.ended, others))
        group.squares = others + generated * generated
        tracked.attained = generated
        self._lengths.passage(before, generated)
        odds = self._answer(tracked, len(tracked.states) - 1)
        return self._tilted(_bins(odds), generated)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """See the protocol."""
        tracked = self._leave(trajectory)
        if tracked is None:
            return
        tracked.group.ended += 1
        tracked.group.squares += generated * generated - tracked.attained * tracked.attained
        self._lengths.passage(tracked.attained, generated)
        self._lengths.end(generated)
        self._learn(tracked, generated, ended=True)
        self._starts.observe((tracked.prompt,), generated)
        for turn in range(len(tracked.states)):
            remaining = generated - tracked.marks[MARKS * turn]
            for path in self._paths(tracked, turn):
                self._tree.observe(path, remaining)
            if tracked.states[turn] != SILENT:
                self._tree.observe((TOOLED,), remaining)
        self._tree.tick()
        self._starts.tick()

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """See the protocol."""
        tracked = self._leave(trajectory)
        if tracked is None:
            return
        self._learn(tracked, tracked.attained, ended=False)
        self._starts.observe_censored((tracked.prompt,), tracked.attained)
        for turn in range(len(tracked.states)):
            beyond = tracked.attained - tracked.marks[MARKS * turn]
            for path in self._paths(tracked, turn):
                self._tree.observe_censored(path, beyond)

    def state(self) -> dict[str, Any]:
        """What it has learned, as JSON-able values; nothing of what is under way."""
        return {
            "tree": self._tree.state(),
            "starts": self._starts.state(),
            "lengths": self._lengths.state(),
            "weights": list(self._weights),
            "slopes": list(self._slopes),
            "count": self._count,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Know what ``state`` says, and nothing else; what is under way stays under way."""
        self._tree.restore(state["tree"])
        self._starts.restore(state["starts"])
        self._lengths.restore(state["lengths"])
        self._weights = list(state["weights"])
        self._slopes = list(state["slopes"])
        self._count = int(state["count"])

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another has learned; view weights are averaged by how much each has learned."""
        self._tree.merge(state["tree"])
        self._starts.merge(state["starts"])
        self._lengths.merge(state["lengths"])
        mine, theirs = self._slopes, state["slopes"]
        self._weights = [
            (a * m + b * t) / (m + t)
            for a, m, b, t in zip(self._weights, mine, state["weights"], theirs, strict=True)
        ]
        self._slopes = [a + b for a, b in zip(mine, theirs, strict=True)]
        self._count += int(state["count"])

    def _tracked(self, trajectory: TrajectoryId, prompt: Tokens) -> _TrackedTrajectory:
        tracked = self._active.get(trajectory)
        if tracked is not None:
            return tracked
        group = self._groups.pop(trajectory.group, None) or _Group()
        # At the end of the order: the oldest idle group is the first to be forgotten.
        self._groups[trajectory.group] = group
        group.active += 1
        tracked = self._active[trajectory] = _TrackedTrajectory(group, prompt)
        return tracked

    def _leave(self, trajectory: TrajectoryId) -> _TrackedTrajectory | None:
        tracked = self._active.pop(trajectory, None)
        if tracked is None:
            return None
        tracked.group.active -= 1
        if len(self._groups) > IDLE_GROUPS + len(self._active):
            idle = [number for number, group in self._groups.items() if not group.active]
            for number in idle[: len(idle) // 4]:
                del self._groups[number]
        return tracked

    def _paths(self, tracked: _TrackedTrajectory, turn: int) -> tuple[tuple[Key, ...], ...]:
        """The five views as paths. The hundreds of a path's first key tell the views apart."""
        marks, states = tracked.marks, tracked.states
        at = MARKS * turn
        generated, context = marks[at], marks[at + 1]
        attained = bin_of(generated)
        latest = bin_of(generated - marks[at - MARKS]) if turn else attained
        state = states[turn]
        which, before = _turn_class(turn), states[turn - 1] if turn else "^"
        tool, _, outcome = state.rsplit("/", 2) if "/" in state else (state, "", "")
        return (
            (which, f"{tool}/{outcome}", state, before),
            (100 + attained, which),
            (200 + bin_of(context), attained),
            (1000 + tracked.prompt, attained, which),
            (300 + latest, attained, which),
        )

    def _views(self, tracked: _TrackedTrajectory, turn: int) -> list[Vector]:
        """Every view's log odds less those of every return."""
        base = self._tree.log_odds(())
        paths = self._paths(tracked, turn)
        return [
            *(self._tree.log_odds(path) - base for path in paths),
            self._siblings(tracked, turn),
        ]

    def _answer(self, tracked: _TrackedTrajectory, turn: int) -> Vector:
        """The law's log odds, without the views that weigh next to nothing."""
        told, kept = [], 1.0
        for weight, path in zip(self._weights, self._paths(tracked, turn), strict=False):
            if weight > TRIFLE:
                told.append(weight * self._tree.log_odds(path))
                kept -= weight
        odds: Vector = kept * self._tree.log_odds(())
        for view in told:
            odds += view
        if self._weights[-1] > TRIFLE:
            odds += self._weights[-1] * self._siblings(tracked, turn)
        return odds

    def _siblings(self, tracked: _TrackedTrajectory, turn: int) -> Vector:
        """What is known of the siblings, less what would be thought without any."""
        generated, _, ended, squares = tracked.marks[MARKS * turn : MARKS * turn + MARKS]
        if not squares:
            return _NOTHING
        prior = SIBLING_KAPPA * self._lengths.mean_square
        then = EDGES + generated
        # Two rows: with the siblings, and without.
        spent = np.array(((prior + squares,), (prior,)))
        powers = np.array(((SIBLING_KAPPA + ended,), (SIBLING_KAPPA,)))
        survival = ((spent + generated * generated) / (spent + then * then)) ** powers
        survival = np.minimum(np.maximum(survival, SURE), 0.999)
        odds = np.log(survival / (1.0 - survival))
        view: Vector = odds[0] - odds[1]
        return view

    def _tilted(self, weights: Vector, attained: float) -> Estimate:
        tilt = self._lengths.tilt()
        if tilt is not None:
            # Of bins that weigh next to nothing the table knows next to nothing.
            ratios = tilt[EDGES.searchsorted(CENTRES + attained)]
            weights = weights * np.where(weights > SURE, ratios, 1.0)
        shares = weights / np.add.reduce(weights)
        return Estimate(tuple(shares.tolist()), float(shares @ CENTRES))

    def _learn(self, tracked: _TrackedTrajectory, generated: float, *, ended: bool) -> None:
        """One AdaGrad step for some returns of a trajectory, spread over its length.

        Where it has not ended, only the bounds below what it reached have taught anything.
        """
        self._count += 1
        if self._count > EAGER and self._count % 4:
            return
        turns = len(tracked.states)
        stride = max(1.0, turns / LESSONS)
        for lesson in range(min(turns, LESSONS)):
            turn = int((lesson + 0.5) * stride)
            views = np.array(self._views(tracked, turn))
            odds = self._tree.log_odds(()) + np.array(self._weights) @ views
            place = bin_of(generated - tracked.marks[MARKS * turn])
            # Truth less prediction, at every bound.
            residuals = -1 / (1 + np.exp(-odds))
            residuals[:place] += 1.0
            if not ended:
                residuals[place:] = 0.0
            self._step((views @ residuals / LESSONS).tolist())

    def _step(self, slopes: list[float]) -> None:
        for i, slope in enumerate(slopes):
            self._slopes[i] += slope * slope
            self._weights[i] = max(0.0, self._weights[i] + RATE * slope / sqrt(self._slopes[i]))


_NOTHING: Vector = np.zeros(BINS - 1)


def _turn_class(turn: int) -> int:
    """Turns from 0 one by one, then in classes that grow."""
    return turn if turn < 6 else int(6 + 2.5 * log2((turn + 1) / 6))


def _bins(odds: Vector) -> Vector:
    """Probabilities of the bins from the log odds of surviving their bounds."""
    above = np.ones(BINS + 1)
    above[-1] = 0.0
    np.minimum.accumulate(1 / (1 + np.exp(-odds)), out=above[1:-1])
    weights: Vector = above[:-1] - above[1:] + 1e-9
    return weights
