"""Planners in circumstances that nobody chose: drawn at random, each from its own number.

Drawn are trace, GPU and model, number of GPUs, staleness bound and rule, oversampling, and what
changes over the run. In each the same groups are played four times::

    libra         from its own first plan
    half          libra's planner from half of the GPUs a side
    kept          libra's own first plan, which nothing changes
    uniform       half of the GPUs a side in servers of four, which nothing changes

``libra`` beside ``uniform`` is what planning is worth to who would have halved the GPUs, and beside
``kept`` what planning *again* is worth. The first is also told for those in which libra fell behind
by more than ``BEHIND``: each of these is a defect to find. A circumstance in which the prices say
that nothing fits, or in which one of the four cannot hold the trajectories, is drawn again.

Limit: one seed of the workload each, so a single difference of some percent may be luck; the means
over circumstances are what counts. The draws are of the traces that are given, which are evaluation
traffic of other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from libra_cli.bench.conditions import MAX_LEN, NETWORK
from libra_cli.bench.config import RULES, Progress, parse_drift
from libra_cli.bench.jobs import (
    Job,
    first_layout_of,
    longest_of,
    playable,
    run_job,
)
from libra_cli.bench.parallel import simulated
from libra_cli.bench.results import Interval, interval
from libra_cli.core.costs.profile import NothingFits
from libra_cli.core.planning.search import Layout
from libra_cli.sim.profiles import load_profile, proposed_profiles
from libra_cli.sim.traces import Trace, TraceError

STEPS = 20
"""Optimizer steps of a run."""
GPUS = (16, 24, 32, 48, 64)
GPUS_A_GROUP = 4
"""GPUs for each group of a step."""
BOUNDS = (0, 1, 1, 2, 4)
DRAWN_RULES = ("", "", "hold")
"""The recipe's default, twice as often as the published rule."""
OVERSAMPLED = (0, 0, 2)
"""Members started beyond those that a group trains; one is drawn."""
MAX_LENS = (MAX_LEN, MAX_LEN, 16_384, 32_768)
"""Tokens at which trajectories are cut, or where memory ends."""
DRIFTS = ("none", "1,4", "4,1", "1,4,1", "turns:1,3", "tools:1,20", "task")
DRAWS = 100
"""The most draws of one circumstance: where no trajectory of a trace can be played, they would go
on for ever. Chosen.
"""
BEHIND = 0.01
"""Share of uniform's throughput from which on libra counts as behind; less is luck."""


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A circumstance drawn at random: its number, and the job of libra from its own start."""

    number: int
    job: Job

    @property
    def kind(self) -> str:
        """The kind of drift over the run, or "no drift"."""
        drift = self.job.drift
        return drift.kind if drift.factors or drift.task else "no drift"

    @property
    def rule(self) -> str:
        """The staleness rule as a recipe names it; empty for the default."""
        spec = self.job.staleness
        return next((name for name, rule in RULES.items() if rule == spec), "")

    def __str__(self) -> str:
        job = self.job
        about = (
            job.trace.name.partition("_")[0],
            f"{job.gpus} x {job.profile.name}",
            f"bound {job.bound}{', ' + self.rule if self.rule else ''}",
            job.variant,
        )
        more = f", oversample {job.oversample}" if job.oversample else ""
        return f"{', '.join(about)}, up to {job.max_len:,} tokens{more}"


@dataclass(frozen=True, slots=True)
class Bout:
    """The throughput of each contender in one circumstance, in generated tokens a second.

    ``moves`` are the servers that libra started and stopped from its own start.
    """

    circumstance: Circumstance
    libra: float
    half: float
    kept: float
    uniform: float
    moves: int

    @property
    def over_uniform(self) -> float:
        """The throughput of libra over that of ``uniform``, less 1."""
        return self.libra / self.uniform - 1

    @property
    def half_over_uniform(self) -> float:
        """The same of libra's planner that begins with half of the GPUs a side."""
        return self.half / self.uniform - 1

    @property
    def over_kept(self) -> float:
        """The throughput of libra over that of its first plan without changes, less 1."""
        return self.libra / self.kept - 1


@dataclass(frozen=True, slots=True)
class Standing:
    """The results of libra in some circumstances: means with half a 95 % interval, worst and best.

    ``behind`` counts those in which libra was behind uniform by more than ``BEHIND``.
    """

    of: str
    number: int
    over_uniform: float
    over_uniform_ci95: Interval | None
    worst: float
    behind: int
    over_kept: float
    over_kept_ci95: Interval | None
    worst_kept: float
    best_kept: float
    half_over_uniform: float

    @classmethod
    def among(cls, of: str, bouts: Sequence[Bout]) -> Standing:
        """Return the standing over at least one bout."""
        uniform, kept = ([getattr(b, n) for b in bouts] for n in ("over_uniform", "over_kept"))
        return cls(
            of,
            len(bouts),
            fmean(uniform),
            interval(uniform),
            min(uniform),
            sum(each < -BEHIND for each in uniform),
            fmean(kept),
            interval(kept),
            min(kept),
            max(kept),
            fmean(each.half_over_uniform for each in bouts),
        )


def tournament(
    traces: Sequence[Trace],
    number: int,
    progress: Progress,
    *,
    first: int = 0,
    network: float = NETWORK,
    policy: str = "libra",
) -> list[Bout]:
    """The circumstances ``first`` to ``first + number - 1``, each played four times."""
    drawn = [circumstance(traces, at, network, policy) for at in range(first, first + number)]
    jobs = [job for each in drawn for job in _contenders(each.job)]
    rows = (row for row, _ in simulated(run_job, jobs, progress))
    found = []
    for each in drawn:
        four = [next(rows) for _ in range(4)]
        libra, half, kept, uniform = (row.throughput_tok_s for row in four)
        found.append(Bout(each, libra, half, kept, uniform, four[0].moves))
    return found


def circumstance(
    traces: Sequence[Trace], number: int, network: float = NETWORK, policy: str = "libra"
) -> Circumstance:
    """The circumstance of this number: the same for the same traces.

    Raises:
        NothingFits: none of ``DRAWS`` draws can be played; says why the last one cannot.
        TraceError: the same, for the prompts of the trace that was drawn last.
    """
    for attempt in range(DRAWS):
        random = Random(f"circumstance/{number}/{attempt}")
        try:
            job = _drawn(random, traces, number, network, policy)
            for each in _contenders(job):
                _check(each)
        except (NothingFits, TraceError):
            if attempt + 1 == DRAWS:
                raise
            continue
        return Circumstance(number, job)
    raise AssertionError("the last draw is returned or raises")


def standings(bouts: Sequence[Bout]) -> Iterator[Standing]:
    """The standing over all circumstances, and by bound, rule, and kind of what changes."""
    yield Standing.among("all", bouts)
    sorts: dict[str, list[Bout]] = {}
    for one in bouts:
        drawn = one.circumstance
        for sort in (f"bound {drawn.job.bound}", f"rule {drawn.rule or 'default'}", drawn.kind):
            sorts.setdefault(sort, []).append(one)
    for sort in sorted(sorts, key=lambda name: (not name.startswith("bound"), name)):
        yield Standing.among(sort, sorts[sort])


def _drawn(
    random: Random, traces: Sequence[Trace], number: int, network: float, policy: str
) -> Job:
    gpus, name = random.choice(GPUS), random.choice(proposed_profiles())
    profile = load_profile(name).on_network(network)
    most = random.choice(MAX_LENS)
    longest = min(most, longest_of(profile, gpus))
    whole = random.choice(traces)
    others = [trace for trace in traces if trace is not whole] or [whole]
    told = random.choice(DRIFTS)
    drift = parse_drift("none" if told == "task" else told, longest)
    if told == "task":
        drift = replace(drift, kind="task", task=playable(random.choice(others), longest)[0])
    rule = random.choice(DRAWN_RULES)
    return Job(
        playable(whole, longest)[0],
        profile,
        profile,
        gpus,
        policy,
        "libra",
        number,
        variant=str(drift),
        drift=drift,
        steps=STEPS,
        groups_per_step=gpus // GPUS_A_GROUP,
        oversample=random.choice(OVERSAMPLED),
        bound=random.choice(BOUNDS),
        staleness=RULES[rule] if rule else {},
        most_tokens=most,
    )


def _contenders(job: Job) -> tuple[Job, ...]:
    """The contenders of the module, in its order."""
    half = _half(job)
    kept = replace(job, planner="static-best")
    return job, replace(job, start=half), kept, replace(job, planner="uniform")


def _half(job: Job) -> Layout:
    return first_layout_of(replace(job, planner="uniform"), job.workload)


def _check(job: Job) -> None:
    """Raise NothingFits where a server cannot hold the longest trajectory, or where the trainer of
    who halves the GPUs cannot: libra's own says itself what it needs."""
    layout = job.start or first_layout_of(job, job.workload)
    costs = [job.profile.servers[bucket.tensor_parallel] for bucket in layout.buckets]
    halved = job.start is not None or job.planner == "uniform"
    trained = job.profile.training.longest_context(layout.training_gpus) if halved else job.max_len
    if trained < job.max_len or any(cost.kv_tokens < job.max_len for cost in costs):
        raise NothingFits("trajectories", f"{layout} does not hold {job.max_len:,} tokens")
