"""The estimators that the causal one is measured against, behind the same protocol.

Each is as simple as its idea. All but ``PaperTree`` answer with a point, so that a placement by
least expected cost and a placement by buckets read the same thing from it. None is told the future,
and none but the published tree reads what a tool returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from libra_cli.core.scheduling.estimates import Estimate, bucket_of
from libra_cli.core.scheduling.prefix_tree import state_of
from libra_cli.core.types import GroupId, Tokens, ToolReturn, TrajectoryId

GUESS = 1000.0
"""What remains, in tokens, before anything has finished."""
IDLE_GROUPS = 4096
"""Groups with nothing under way that are remembered."""


class _RunningMean:
    """A running mean."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else GUESS


class AlwaysShortest:
    """Nothing remains: everything stays in the first bucket."""

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """Zero tokens."""
        return Estimate.point(0)

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """Zero tokens."""
        return Estimate.point(0)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """It learns nothing."""

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """It learns nothing."""


class Attained(AlwaysShortest):
    """Classic MLFQ: what has been generated is what remains, so service received moves it up."""

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """As many tokens as have been generated."""
        return Estimate.point(generated)


class TurnIndexMean:
    """The mean of what remained after this many turns, in all that have finished."""

    def __init__(self) -> None:
        self._means: list[_RunningMean] = [_RunningMean()]
        self._marks: dict[TrajectoryId, list[Tokens]] = {}

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """The mean length of all that have finished."""
        self._marks[trajectory] = [0]
        return self._at(0)

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """The mean of the remainders at this turn."""
        marks = self._marks[trajectory]
        marks.append(generated)
        return self._at(len(marks) - 1)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Count its remainder at each of its turns."""
        for turn, mark in enumerate(self._marks.pop(trajectory)):
            if turn == len(self._means):
                self._means.append(_RunningMean())
            self._means[turn].add(generated - mark)

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """Forget it."""
        self._marks.pop(trajectory, None)

    def _at(self, turn: int) -> Estimate:
        # Beyond the longest seen, the longest seen.
        return Estimate.point(self._means[min(turn, len(self._means) - 1)].value)


class SiblingMean(TurnIndexMean):
    """The mean length of the group's finished trajectories less what has been generated.

    Before one has finished, and where more than that mean has been generated: the turn's mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[GroupId, _RunningMean] = {}

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """The mean of the siblings, or of all."""
        usual = super().begin(trajectory, prompt=prompt)
        return self._less(trajectory, 0, usual)

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """The siblings' mean less ``generated``, or the turn's mean."""
        usual = super().returned(trajectory, generated=generated, context=context, returns=returns)
        return self._less(trajectory, generated, usual)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """A sibling of the others has finished."""
        super().finished(trajectory, generated=generated)
        siblings = self._groups.pop(trajectory.group, None) or _RunningMean()
        siblings.add(generated)
        self._groups[trajectory.group] = siblings
        if len(self._groups) > IDLE_GROUPS:
            del self._groups[next(iter(self._groups))]

    def _less(self, trajectory: TrajectoryId, generated: Tokens, usual: Estimate) -> Estimate:
        siblings = self._groups.get(trajectory.group)
        if siblings is None or siblings.value <= generated:
            return usual
        return Estimate.point(siblings.value - generated)


class _Seen:
    """A node of the published tree: the mean of all, the 90th percentile of the latest."""

    __slots__ = ("children", "latest", "mean")

    def __init__(self) -> None:
        self.mean = _RunningMean()
        self.latest: deque[float] = deque(maxlen=WINDOW)
        self.children: dict[str, _Seen] = {}

    def add(self, remaining: float) -> None:
        self.mean.add(remaining)
        self.latest.append(remaining)

    @property
    def p90(self) -> float:
        ordered = sorted(self.latest)
        return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


WINDOW = 128
"""Observations in a node's percentile."""


class PaperTree:
    """The published tree (Libra, arXiv 2606.03077): a node per prompt, then per ordered states.

    A node that does not exist falls back to its parent, whose remainder is taken as it stands. One
    visit makes a node. ``pooled`` leaves the prompt out of the key (a variant: in a run whose
    prompts never come again, a tree by prompt knows only siblings).
    """

    def __init__(self, *, pooled: bool = False) -> None:
        self._pooled = pooled
        self._root = _Seen()
        self._paths: dict[TrajectoryId, list[str]] = {}
        self._marks: dict[TrajectoryId, list[Tokens]] = {}

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """The mean at the prompt's node."""
        self._paths[trajectory] = [] if self._pooled else [str(trajectory.group)]
        self._marks[trajectory] = []
        return self._mean(trajectory)

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """The mean at the node of what its tools returned so far, or at the deepest one seen."""
        self._paths[trajectory].append(state_of(returns))
        self._marks[trajectory].append(generated)
        return self._mean(trajectory)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Count its remainder at each node of its path."""
        path, marks = self._paths.pop(trajectory), self._marks.pop(trajectory)
        first = len(path) - len(marks)
        node = self._root
        node.add(generated)
        for place, key in enumerate(path):
            node = node.children.setdefault(key, _Seen())
            node.add(generated - (marks[place - first] if place >= first else 0))
        if len(self._root.children) > IDLE_GROUPS:
            del self._root.children[next(iter(self._root.children))]

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """Forget it."""
        self._paths.pop(trajectory, None)
        self._marks.pop(trajectory, None)

    def agrees(self, trajectory: TrajectoryId, bounds: Sequence[float]) -> int | None:
        """The bucket in which the mean and the P90 of its node fall, or None: then it stays."""
        node = self._node(trajectory)
        if not node.latest:
            return None
        bucket = bucket_of(node.mean.value, bounds)
        return bucket if bucket == bucket_of(node.p90, bounds) else None

    def _mean(self, trajectory: TrajectoryId) -> Estimate:
        return Estimate.point(self._node(trajectory).mean.value)

    def _node(self, trajectory: TrajectoryId) -> _Seen:
        node = self._root
        for key in self._paths[trajectory]:
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node
