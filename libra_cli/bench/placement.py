"""Placement quality: does an estimator put a trajectory into the bucket of what remains of it?

The experiment, for one trace and seed. The tasks are shuffled and dealt into ``FOLDS`` folds. For
each fold the estimator plays the others first and learns; then it plays the held-out fold, still
learning, and there its placements count. To play is to run a clock: ``IN_FLIGHT`` groups are under
way, a turn takes ``TOKEN_S`` a token plus its tool's time, a group that is through is followed by
the next. So an estimator sees only what had happened by then: with ``together`` the siblings of a
group start at once and those that have finished are the shorter ones; without, one starts when the
one before has ended.

A placement happens at every tool return that another turn follows (in a trace without outcomes: at
every turn boundary). Everything starts in the short bucket. Buckets are by remaining generated
tokens: short up to 1.1 times the geometric mean of the totals of the whole trace, long above the
larger of their 80th percentile and 1.25 times the short bound. With these bounds, "always short"
is right for 71, 78, 77, 69 and 77 % of the returns of moatless, SWE-agent, mini-swe-agent,
tau-bench and tau2 (published for the authors' artifact: 71.9, 75.5, 79.1, 69.9, 75.0).

What is measured: the share of placements in the true bucket; the mean over the buckets of the
share of its returns that were placed there (a constant rule has a third); moves, and wrong-way
moves, which end further from the true bucket than they started; and the calibration of the
distribution: the expected error of the stated probabilities that at most a bound remains, and the
log loss of these. Limit: traces are other models' evaluation traffic, censored by their own stop
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from math import exp, log
from random import Random
from statistics import fmean, quantiles
from time import perf_counter
from typing import Protocol, TypeAlias

from libra_cli.bench.config import Progress, parse_names
from libra_cli.core.scheduling.baseline_estimators import (
    AlwaysShortest,
    Attained,
    PaperTree,
    SiblingMean,
    TurnIndexMean,
)
from libra_cli.core.scheduling.causal_estimator import CausalEstimator
from libra_cli.core.scheduling.estimates import (
    Estimate,
    Estimator,
    bucket_of,
    choose_bucket,
)
from libra_cli.core.types import Seconds, Tokens, ToolOutcome, ToolReturn, TrajectoryId
from libra_cli.sim.traces import DEFAULT_TRACE, RecordedEpisode, Trace, Turn, load_trace

FOLDS = 5
IN_FLIGHT = 16
"""Groups under way at once; this and what follows chosen, not measured."""
TOKEN_S: Seconds = 1 / 50
CHARACTERS = 4
"""Characters a token, for the size of a payload."""
BUCKETS = 3
RELIABILITY_BINS = 10

Group: TypeAlias = Sequence[RecordedEpisode]
Decide: TypeAlias = Callable[[TrajectoryId, Estimate, int], int]
"""The bucket a trajectory should be in, from its estimate and the bucket it is in."""


def bounds_of(episodes: Sequence[RecordedEpisode]) -> tuple[float, float]:
    """Upper edges of the short and the middle bucket, in tokens; see the module for the rule."""
    totals = [episode.generated for episode in episodes]
    short = 1.1 * exp(fmean(log(total) for total in totals))
    p80 = quantiles(totals, n=5)[3] if len(totals) > 1 else totals[0]
    return short, max(p80, 1.25 * short)


def returns_of(turn: Turn) -> tuple[ToolReturn, ...]:
    """What the tools of a recorded turn returned; an outcome that was not recorded counts as ok."""
    if not turn.tool:
        return ()
    size = CHARACTERS * turn.observation
    return (ToolReturn(turn.tool, turn.outcome or ToolOutcome.OK, turn.tool_s, size),)


class Watcher(Protocol):
    """Hears every answer an estimator gives while a stream is played."""

    def heard(
        self, trajectory: TrajectoryId, turn: Turn, remaining: Tokens, estimate: Estimate
    ) -> None:
        """After ``turn``, with so many tokens to come in truth, it answered with ``estimate``."""
        ...


class Deaf:
    """Hears nothing: for playing what is only learned from."""

    def heard(
        self, trajectory: TrajectoryId, turn: Turn, remaining: Tokens, estimate: Estimate
    ) -> None:
        """Nothing."""


@dataclass(slots=True)
class _Playing:
    """A trajectory under way: ``turn`` is the one being generated."""

    id: TrajectoryId
    episode: RecordedEpisode
    context: Tokens
    turn: int = 0
    generated: Tokens = 0


class RequestStream:
    """Groups played to an estimator by the clock. See the module."""

    def __init__(
        self,
        groups: Iterable[tuple[int, Group]],
        estimator: Estimator,
        watcher: Watcher,
        *,
        together: bool = True,
    ) -> None:
        """``groups`` come with their numbers, which no other group may have had."""
        self._groups = iter(groups)
        self._estimator = estimator
        self._watcher = watcher
        self._together = together
        self._heap: list[tuple[Seconds, int, _Playing]] = []
        self._pushed = 0
        self._waiting: dict[int, list[_Playing]] = {}
        self._left: dict[int, int] = {}
        self.now: Seconds = 0.0
        self.answered_s: Seconds = 0.0
        """Spent in the estimator's ``returned``."""
        self.answers = 0

    def play(self) -> None:
        """To the end of the last group."""
        for _ in range(IN_FLIGHT):
            self._admit(0.0)
        while self._heap:
            self.now, _, playing = heappop(self._heap)
            self._turn_over(playing, self.now)

    def _admit(self, now: Seconds) -> None:
        number, group = next(self._groups, (0, None))
        if group is None:
            return
        members = [
            _Playing(TrajectoryId(number, member), episode, episode.prompt)
            for member, episode in enumerate(group)
        ]
        self._left[number] = len(members)
        self._waiting[number] = members[::-1]
        for _ in range(len(members) if self._together else 1):
            self._start(number, now)

    def _start(self, number: int, now: Seconds) -> None:
        if self._waiting[number]:
            playing = self._waiting[number].pop()
            self._estimator.begin(playing.id, prompt=playing.episode.prompt)
            self._push(playing, now)

    def _push(self, playing: _Playing, now: Seconds) -> None:
        turns = playing.episode.turns
        turn = turns[playing.turn]
        took = turn.generated * TOKEN_S + (turn.tool_s if playing.turn + 1 < len(turns) else 0.0)
        self._pushed += 1
        heappush(self._heap, (now + took, self._pushed, playing))

    def _turn_over(self, playing: _Playing, now: Seconds) -> None:
        turn = playing.episode.turns[playing.turn]
        playing.generated += turn.generated
        playing.context += turn.generated + turn.observation
        playing.turn += 1
        if playing.turn == len(playing.episode.turns):
            self._ended(playing, now)
            return
        started = perf_counter()
        estimate = self._estimator.returned(
            playing.id,
            generated=playing.generated,
            context=playing.context,
            returns=returns_of(turn),
        )
        self.answered_s += perf_counter() - started
        self.answers += 1
        remaining = playing.episode.generated - playing.generated
        self._watcher.heard(playing.id, turn, remaining, estimate)
        self._push(playing, now)

    def _ended(self, playing: _Playing, now: Seconds) -> None:
        self._estimator.finished(playing.id, generated=playing.generated)
        number = playing.id.group
        self._left[number] -= 1
        if not self._left[number]:
            del self._left[number], self._waiting[number]
            self._admit(now)
        elif not self._together:
            self._start(number, now)


@dataclass(slots=True)
class Tally:
    """Counts placements as they are heard; ``decide`` and the buckets are one stream's."""

    bounds: Sequence[float]
    only_tools: bool
    decide: Decide = lambda trajectory, estimate, current: current
    placed: list[list[int]] = field(default_factory=lambda: [[0] * BUCKETS for _ in range(BUCKETS)])
    moves: int = 0
    wrong: int = 0
    loss: float = 0.0
    reliability: list[list[float]] = field(
        default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(RELIABILITY_BINS)]
    )
    _buckets: dict[TrajectoryId, int] = field(default_factory=dict)

    def begin(self, decide: Decide) -> None:
        """A new stream: other trajectories under the same ids, and another estimator's rule."""
        self.decide = decide
        self._buckets.clear()

    def heard(
        self, trajectory: TrajectoryId, turn: Turn, remaining: Tokens, estimate: Estimate
    ) -> None:
        """Place it, and compare with the truth."""
        if self.only_tools and turn.outcome is None:
            return
        current = self._buckets.get(trajectory, 0)
        chosen = self.decide(trajectory, estimate, current)
        truth = bucket_of(remaining, self.bounds)
        self._buckets[trajectory] = chosen
        self.placed[truth][chosen] += 1
        self.moves += chosen != current
        self.wrong += abs(chosen - truth) > abs(current - truth)
        for bound in self.bounds:
            self._judge(estimate.share_below(bound), remaining <= bound)

    def _judge(self, stated: float, came: bool) -> None:
        row = self.reliability[min(RELIABILITY_BINS - 1, int(stated * RELIABILITY_BINS))]
        row[0] += 1
        row[1] += stated
        row[2] += came
        kept = min(max(stated, 0.005), 0.995)
        self.loss -= log(kept if came else 1 - kept)


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """One estimator on one trace with one seed. Shares are of 1.

    ``wrong_share`` is of its moves (None without any), ``wrong_per_100`` of its placements.
    ``calibration`` has (mean stated probability, observed share, count) by tenths of the former,
    ``calibration_error`` their mean distance weighted by count, ``log_loss`` is per bound.
    """

    estimator: str
    trace: str
    seed: int
    placements: int
    right_share: float
    mean_recall: float
    moves_per_100: float
    wrong_share: float | None
    wrong_per_100: float
    calibration_error: float
    log_loss: float
    calibration: tuple[tuple[float, float, int], ...]
    returned_us: float


@dataclass(frozen=True, slots=True)
class Contender:
    """An estimator under test: how to make one, and how its answers become placements."""

    make: Callable[[], Estimator]
    rule: Callable[[Estimator, Sequence[float]], Decide]


def _by_mean(estimator: Estimator, bounds: Sequence[float]) -> Decide:
    return lambda trajectory, estimate, current: bucket_of(estimate.mean, bounds)


def _by_agreement(estimator: Estimator, bounds: Sequence[float]) -> Decide:
    if not isinstance(estimator, PaperTree):
        raise TypeError("the mean-and-P90 rule needs the published tree")

    def decide(trajectory: TrajectoryId, estimate: Estimate, current: int) -> int:
        agreed = estimator.agrees(trajectory, bounds)
        return current if agreed is None else agreed

    return decide


def _by_score(estimator: Estimator, bounds: Sequence[float]) -> Decide:
    if not isinstance(estimator, CausalEstimator):
        raise TypeError("the score needs the prior of the causal estimator")
    return lambda trajectory, estimate, current: choose_bucket(
        estimate, estimator.prior, bounds, current
    )


CONTENDERS: dict[str, Contender] = {
    "libra": Contender(CausalEstimator, _by_score),
    "published-tree": Contender(PaperTree, _by_agreement),
    "published-tree-pooled": Contender(lambda: PaperTree(pooled=True), _by_agreement),
    "siblings": Contender(SiblingMean, _by_mean),
    "turn-index": Contender(TurnIndexMean, _by_mean),
    "attained": Contender(Attained, _by_mean),
    "always-shortest": Contender(AlwaysShortest, _by_mean),
}
"""Our estimator and its baselines, by the names of the table."""


def placement(
    traces: Sequence[str],
    estimators: str,
    seeds: int,
    *,
    together: bool,
    progress: Progress,
) -> list[PlacementRow]:
    """Placement quality of each estimator, one row a trace, name and seed.

    Raises:
        LibraError: a trace that cannot be read, or an unknown estimator.
    """
    names = parse_names("estimator", estimators, tuple(CONTENDERS))
    rows = []
    for trace in [load_trace(name) for name in traces or (DEFAULT_TRACE,)]:
        for name, seed in product(names, range(seeds)):
            progress(f"{trace.name}: {name}, seed {seed}")
            rows.append(measure(trace, seed, name, together=together))
    return rows


def folds(trace: Trace, seed: int) -> Iterator[tuple[list[Group], list[Group]]]:
    """What to learn from and what to be tested on, ``FOLDS`` times; no task is in both."""
    random = Random(seed)
    groups = list(trace.by_task().values())
    random.shuffle(groups)
    drawn: list[Group] = [random.sample(group, len(group)) for group in groups]
    for fold in range(min(FOLDS, len(drawn))):
        seen: list[Group] = [group for number, group in enumerate(drawn) if number % FOLDS != fold]
        yield seen, drawn[fold::FOLDS]


def measure(trace: Trace, seed: int, name: str, *, together: bool = True) -> PlacementRow:
    """Placement quality of one of ``CONTENDERS``."""
    contender = CONTENDERS[name]
    tally = Tally(bounds_of(trace.episodes), "tool outcomes" not in trace.lacks)
    answered_s, answers = 0.0, 0
    for seen, held_out in folds(trace, seed):
        estimator = contender.make()
        RequestStream(enumerate(seen), estimator, Deaf(), together=together).play()
        tally.begin(contender.rule(estimator, tally.bounds))
        numbered = enumerate(held_out, start=len(seen))
        stream = RequestStream(numbered, estimator, tally, together=together)
        stream.play()
        answered_s += stream.answered_s
        answers += stream.answers
    return _summed(tally, name, trace.name, seed, 1e6 * answered_s / max(1, answers))


def _summed(tally: Tally, name: str, trace: str, seed: int, returned_us: float) -> PlacementRow:
    count = max(1, sum(map(sum, tally.placed)))
    recalls = [row[i] / sum(row) for i, row in enumerate(tally.placed) if sum(row)]
    judged = [row for row in tally.reliability if row[0]]
    return PlacementRow(
        estimator=name,
        trace=trace,
        seed=seed,
        placements=count,
        right_share=sum(row[i] for i, row in enumerate(tally.placed)) / count,
        mean_recall=fmean(recalls) if recalls else 0.0,
        moves_per_100=100 * tally.moves / count,
        wrong_share=tally.wrong / tally.moves if tally.moves else None,
        wrong_per_100=100 * tally.wrong / count,
        calibration_error=sum(abs(row[1] - row[2]) for row in judged)
        / max(1.0, sum(row[0] for row in judged)),
        log_loss=tally.loss / count / len(tally.bounds),
        calibration=tuple((row[1] / row[0], row[2] / row[0], int(row[0])) for row in judged),
        returned_us=returned_us,
    )
