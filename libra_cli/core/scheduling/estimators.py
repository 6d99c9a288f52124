"""How many tokens a trajectory has yet to generate: the estimates that the baselines go by.

libra's own policy asks for none (``least_cost`` says why), and ``cmlfq`` has its own
(``causal_tree``). Each estimator here is as simple as its idea, sees the past only, and learns from
what has finished; none but the published tree reads what a tool returned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from libra_cli.core.types import GroupId, Tokens, ToolOutcome, ToolReturn, TrajectoryId

GUESS = 1000.0
"""Tokens left of a trajectory before anything has finished."""
IDLE_GROUPS = 4096
"""Groups with nothing under way that are remembered."""
WINDOW = 128
"""Observations in the percentile of a node of the published tree."""
SIZES = (200, 800, 3200, 12800)
"""Upper edges of the classes of a tool's payload, in characters."""
SILENT = "-"
"""The state of a turn without a tool call."""


class Estimator(Protocol):
    """Asked at every tool return; an answer is the mean of the tokens yet to be generated."""

    def begin(self, trajectory: TrajectoryId) -> float:
        """Take in a trajectory that starts; returns the tokens expected of it."""
        ...

    def returned(
        self, trajectory: TrajectoryId, *, generated: Tokens, returns: Sequence[ToolReturn]
    ) -> float:
        """Learn that a turn is over and another follows; ``generated`` is the total so far."""
        ...

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Learn that the trajectory came to its own end after ``generated`` tokens."""
        ...

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """Learn that the trajectory was given up, played again or
        cut: its whole length is not known.
        """
        ...


class _RunningMean:
    """A mean that is kept as a sum and a number."""

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


class SiblingMean:
    """The mean length of the group's finished trajectories less what has been generated.

    Before one has finished, and where more than that mean has been generated: the mean of what
    remained after this many turns, in all that have finished.
    """

    def __init__(self) -> None:
        self._means: list[_RunningMean] = [_RunningMean()]
        self._marks: dict[TrajectoryId, list[Tokens]] = {}
        self._groups: dict[GroupId, _RunningMean] = {}

    def begin(self, trajectory: TrajectoryId) -> float:
        """The mean of the siblings, or of all."""
        self._marks[trajectory] = [0]
        return self._left(trajectory, 0)

    def returned(
        self, trajectory: TrajectoryId, *, generated: Tokens, returns: Sequence[ToolReturn]
    ) -> float:
        """The siblings' mean less ``generated``, or the turn's mean."""
        self._marks[trajectory].append(generated)
        return self._left(trajectory, generated)

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Count its length for its siblings, and its remainder at each of its turns for all."""
        for turn, mark in enumerate(self._marks.pop(trajectory)):
            if turn == len(self._means):
                self._means.append(_RunningMean())
            self._means[turn].add(generated - mark)
        siblings = self._groups.pop(trajectory.group, None) or _RunningMean()
        siblings.add(generated)
        self._groups[trajectory.group] = siblings
        if len(self._groups) > IDLE_GROUPS:
            del self._groups[next(iter(self._groups))]

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        self._marks.pop(trajectory, None)

    def _left(self, trajectory: TrajectoryId, generated: Tokens) -> float:
        siblings = self._groups.get(trajectory.group)
        if siblings is not None and siblings.value > generated:
            return siblings.value - generated
        turn = len(self._marks[trajectory]) - 1
        # Beyond the longest seen, the longest seen.
        return self._means[min(turn, len(self._means) - 1)].value


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


class PaperTree:
    """The published tree (Libra, arXiv 2606.03077): a node per prompt, then per ordered states.

    A node that does not exist falls back to its parent, whose remainder is taken as it stands. One
    visit makes a node.
    """

    def __init__(self) -> None:
        self._root = _Seen()
        self._paths: dict[TrajectoryId, list[str]] = {}
        self._marks: dict[TrajectoryId, list[Tokens]] = {}

    def begin(self, trajectory: TrajectoryId) -> float:
        """The mean at the prompt's node."""
        self._paths[trajectory] = [str(trajectory.group)]
        self._marks[trajectory] = [0]
        return self._node(trajectory).mean.value

    def returned(
        self, trajectory: TrajectoryId, *, generated: Tokens, returns: Sequence[ToolReturn]
    ) -> float:
        """The mean at the node of what its tools returned so far, or at the deepest one seen."""
        self._paths[trajectory].append(state_of(returns))
        self._marks[trajectory].append(generated)
        return self._node(trajectory).mean.value

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Count its remainder at each node of its path."""
        path, marks = self._paths.pop(trajectory), self._marks.pop(trajectory)
        node = self._root
        node.add(generated)
        for key, mark in zip(path, marks, strict=True):
            node = node.children.setdefault(key, _Seen())
            node.add(generated - mark)
        if len(self._root.children) > IDLE_GROUPS:
            del self._root.children[next(iter(self._root.children))]

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        self._paths.pop(trajectory, None)
        self._marks.pop(trajectory, None)

    def agrees(self, trajectory: TrajectoryId, bounds: Sequence[float]) -> int | None:
        """The bucket in which the mean and the P90 of its node fall, or None: then it stays."""
        node = self._node(trajectory)
        if not node.latest:
            return None
        bucket = bucket_of(node.mean.value, bounds)
        return bucket if bucket == bucket_of(node.p90, bounds) else None

    def _node(self, trajectory: TrajectoryId) -> _Seen:
        node = self._root
        for key in self._paths[trajectory]:
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node


def bucket_of(tokens: float, bounds: Sequence[float]) -> int:
    """The bucket a remainder belongs to. ``bounds``: upper edges of all but the last, ascending."""
    return sum(tokens > bound for bound in bounds)


def state_of(returns: Sequence[ToolReturn]) -> str:
    """The state a turn's returns make: the last tool, their summed payload, the worst outcome.

    A turn without a tool call has the state ``SILENT``.
    """
    if not returns:
        return SILENT
    size = sum(each.characters for each in returns)
    outcome = max((each.outcome for each in returns), key=_BADNESS.__getitem__)
    return f"{returns[-1].tool}/{bisect_left(SIZES, size)}/{outcome.value}"


_BADNESS = {ToolOutcome.OK: 0, ToolOutcome.ERROR: 1, ToolOutcome.TIMEOUT: 2}
