"""Whether a rule puts a trajectory into the bucket of the work that it has left.

For one trace and seed the tasks are shuffled, and one in ``HELD_OUT`` is held out. A rule first
sees the other tasks and learns; then it sees those held out, still learning, and there its
placements count. Both are played by a clock: ``IN_FLIGHT`` groups are under way, their members from
the start, and a turn takes ``TOKEN_S`` a token plus its tool's time. So a rule sees only what had
happened by then, of a group first those that are short, and of siblings little in time.

``causal tree`` moves a trajectory where its mean and P90 agree, which is the published rule and
that of ``cmlfq``; ``its likeliest`` is the same tree with the bucket that it finds likeliest.

A placement is at each tool return that another turn follows. Buckets are by generated tokens left:
the first up to 1.1 times the geometric mean length of the trace, the last above the larger of its
80th percentile and 1.25 times that; every trajectory starts in the first. ``right`` is the share of
placements in the true bucket, ``recall`` the mean over the buckets of the share of theirs (a rule
that says the same of all has a third), and ``moved`` the share of the contexts at all placements
that changed their bucket, in tokens.

What is published (``PUBLISHED``) is of Search-R1, which no trace here is like.

Limit: traces are of other models and no RL rollouts, cut by their own stop rules. Seeds divide the
same trajectories anew, so an interval over them is of the division and not of other workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import exp, log
from random import Random
from statistics import fmean, quantiles
from typing import TypeAlias

from libra_cli.bench.config import Progress
from libra_cli.core.scheduling.causal_tree import EDGES, CausalTree
from libra_cli.core.scheduling.estimators import Estimator, PaperTree, SiblingMean, bucket_of
from libra_cli.core.types import Seconds, Tokens, TrajectoryId
from libra_cli.sim.episodes import returns_of
from libra_cli.sim.traces import RecordedEpisode, Trace

HELD_OUT = 5
"""One task in so many is held out; this and what follows is chosen."""
IN_FLIGHT = 16
TOKEN_S: Seconds = 1 / 50
BUCKETS = 3
OURS = "causal tree"
"""The rule of the policy ``cmlfq``."""
PUBLISHED = "91.1 % right, 8.2 % moved; embeddings 65.2 %, attained service 44.8 %"
"""What one-shot routing on Search-R1 reached (Libra, arXiv 2606.03077)."""

Group: TypeAlias = Sequence[RecordedEpisode]
Bounds: TypeAlias = tuple[float, float]
Place: TypeAlias = Callable[[TrajectoryId, Tokens, float, int], int]
"""The bucket for a trajectory that has generated so many tokens, is expected to generate so many
more, and is in that bucket now."""


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """The placements of one rule on one trace with one seed, which had ``right``, ``recall`` and
    ``moved`` as shares of 1."""

    rule: str
    trace: str
    seed: int
    placements: int
    right: float
    recall: float
    moved: float


class _TurnMean(SiblingMean):
    """The mean of what remained after as many turns, whatever the siblings had."""

    def _left(self, trajectory: TrajectoryId, generated: Tokens) -> float:
        alone = len(self._marks[trajectory]) - 1
        return self._means[min(alone, len(self._means) - 1)].value


class _LikeliestBucket(CausalTree):
    """The causal tree with another rule: the bucket of the largest probability."""

    def level(self, trajectory: TrajectoryId, bounds: Sequence[float]) -> int:
        """The likeliest bucket; a class of tokens left counts for that of its middle."""
        generated, path = self._under_way[trajectory].marks[-1]
        expected = self._expected(path, self._beyond(trajectory.group, generated))
        if expected is None:
            return 0
        chances = [0.0] * (len(bounds) + 1)
        edges = (0, *EDGES, 2 * EDGES[-1])
        for (low, high), share in zip(pairwise(edges), expected.shares, strict=True):
            chances[bucket_of((low + high) / 2, bounds)] += share
        return chances.index(max(chances))


def _shortest(bounds: Bounds) -> tuple[Estimator, Place]:
    return SiblingMean(), lambda who, generated, expected, now: 0


def _attained(bounds: Bounds) -> tuple[Estimator, Place]:
    return SiblingMean(), lambda who, generated, expected, now: bucket_of(generated, bounds)


def _turn_index(bounds: Bounds) -> tuple[Estimator, Place]:
    return _TurnMean(), lambda who, generated, expected, now: bucket_of(expected, bounds)


def _siblings(bounds: Bounds) -> tuple[Estimator, Place]:
    return SiblingMean(), lambda who, generated, expected, now: bucket_of(expected, bounds)


def _published(bounds: Bounds) -> tuple[Estimator, Place]:
    tree = PaperTree()

    def place(who: TrajectoryId, generated: Tokens, expected: float, now: int) -> int:
        agreed = tree.agrees(who, bounds)
        return now if agreed is None else agreed

    return tree, place


def _causal(bounds: Bounds) -> tuple[Estimator, Place]:
    return _by_level(CausalTree(), bounds)


def _likeliest(bounds: Bounds) -> tuple[Estimator, Place]:
    return _by_level(_LikeliestBucket(), bounds)


def _by_level(tree: CausalTree, bounds: Bounds) -> tuple[Estimator, Place]:
    return tree, lambda who, generated, expected, now: tree.level(who, bounds)


RULES: Mapping[str, Callable[[Bounds], tuple[Estimator, Place]]] = {
    "always the shortest": _shortest,
    "attained service": _attained,
    "turn index": _turn_index,
    "siblings": _siblings,
    "published tree": _published,
    OURS: _causal,
    "its likeliest": _likeliest,
}
"""A fresh estimator and rule, by the name in the table."""


def routing(traces: Sequence[Trace], seeds: int, progress: Progress) -> list[RoutingRow]:
    """Every rule on every trace, one row each and seed."""
    rows = []
    for trace in traces:
        for seed in range(seeds):
            progress(f"{trace.name}, seed {seed}")
            rows += [_measured(trace, rule, seed) for rule in RULES]
    return rows


def bounds_of(episodes: Sequence[RecordedEpisode]) -> Bounds:
    """Upper edges of the first and the second bucket, in tokens; see the module for the rule."""
    totals = [episode.generated for episode in episodes]
    short = 1.1 * exp(fmean(log(total) for total in totals))
    p80 = quantiles(totals, n=5)[3] if len(totals) > 1 else totals[0]
    return short, max(p80, 1.25 * short)


def _measured(trace: Trace, rule: str, seed: int) -> RoutingRow:
    random = Random(f"routing/{seed}")
    groups = list(trace.by_task().values())
    random.shuffle(groups)
    shuffled = [random.sample(group, len(group)) for group in groups]
    bounds = bounds_of(trace.episodes)
    estimator, place = RULES[rule](bounds)
    cut = len(shuffled) - max(1, len(shuffled) // HELD_OUT)
    _Clock(enumerate(shuffled[:cut]), estimator, place, bounds).play()
    held_out = _Clock(enumerate(shuffled[cut:], start=cut), estimator, place, bounds)
    held_out.play()
    return held_out.tally.row(rule, trace.name, seed)


@dataclass(slots=True)
class _Tally:
    """``placed[truth][chosen]`` counts placements; contexts are in tokens."""

    placed: list[list[int]] = field(default_factory=lambda: [[0] * BUCKETS for _ in range(BUCKETS)])
    contexts: Tokens = 0
    moved: Tokens = 0

    def row(self, rule: str, trace: str, seed: int) -> RoutingRow:
        count = max(1, sum(map(sum, self.placed)))
        recalls = [row[at] / sum(row) for at, row in enumerate(self.placed) if sum(row)]
        right = sum(row[at] for at, row in enumerate(self.placed)) / count
        recall, moved = fmean(recalls or [0.0]), self.moved / max(1, self.contexts)
        return RoutingRow(rule, trace, seed, count, right, recall, moved)


@dataclass(slots=True)
class _Playing:
    """A trajectory under way: ``turn`` is the one being generated, ``bucket`` the one it is in."""

    who: TrajectoryId
    episode: RecordedEpisode
    context: Tokens
    turn: int = 0
    generated: Tokens = 0
    bucket: int = 0


class _Clock:
    """Groups played to a rule, in the order in which turns end."""

    def __init__(
        self,
        groups: Iterable[tuple[int, Group]],
        estimator: Estimator,
        place: Place,
        bounds: Bounds,
    ) -> None:
        """``groups`` come with their numbers, which no other group may have had."""
        self.tally = _Tally()
        self._groups: Iterator[tuple[int, Group]] = iter(groups)
        self._estimator = estimator
        self._place = place
        self._bounds = bounds
        self._heap: list[tuple[Seconds, int, _Playing]] = []
        self._order = 0
        self._under_way: dict[int, int] = {}

    def play(self) -> None:
        """Play to the end of the last group."""
        for _ in range(IN_FLIGHT):
            self._start(0.0)
        while self._heap:
            now, _, playing = heappop(self._heap)
            self._turn_over(playing, now)

    def _start(self, now: Seconds) -> None:
        number, group = next(self._groups, (0, ()))
        if group:
            self._under_way[number] = len(group)
        for member, episode in enumerate(group):
            who = TrajectoryId(number, member)
            self._estimator.begin(who)
            self._push(_Playing(who, episode, episode.prompt), now)

    def _push(self, playing: _Playing, now: Seconds) -> None:
        turn = playing.episode.turns[playing.turn]
        self._order += 1
        took = turn.generated * TOKEN_S + turn.tool_s
        heappush(self._heap, (now + took, self._order, playing))

    def _turn_over(self, playing: _Playing, now: Seconds) -> None:
        turn = playing.episode.turns[playing.turn]
        playing.generated += turn.generated
        playing.context += turn.generated + turn.observation
        playing.turn += 1
        if playing.turn < len(playing.episode.turns):
            expected = self._estimator.returned(
                playing.who, generated=playing.generated, returns=returns_of(turn)
            )
            self._count(playing, expected)
            self._push(playing, now)
            return
        self._estimator.finished(playing.who, generated=playing.generated)
        group = playing.who.group
        self._under_way[group] -= 1
        if not self._under_way[group]:
            self._start(now)

    def _count(self, playing: _Playing, expected: float) -> None:
        chosen = self._place(playing.who, playing.generated, expected, playing.bucket)
        truth = bucket_of(playing.episode.generated - playing.generated, self._bounds)
        self.tally.placed[truth][chosen] += 1
        self.tally.contexts += playing.context
        self.tally.moved += playing.context if chosen != playing.bucket else 0
        playing.bucket = chosen
