"""What is lost by not having known: libra beside the best plans in hindsight, on the same runs.

    best static               one plan for the whole run, the best of those simulated on it
      trainer's GPUs serve    the best where a server on each node that trains as a whole takes
                              requests while the trainer waits (``nodes[].share``)
    clairvoyant               the best such plan of each part of the run, one after the other, or
                              the best static one where that did better
    clairvoyant, free moves   the same where servers and gradient workers start at once
    libra, work told          libra's planner, told the work to come and not the work that was
    libra                     from its own first plan, from that of a recipe without lengths, from
                              half of the GPUs, from the worst split
    told                      from the same starts the best static plan from the first look on,
                              or no move at all
    uniform                   half of the GPUs to each side; nothing moves

The best static plan is looked for by simulating equal servers of every degree that fits on a
quarter, half and three quarters of the GPUs, and then, for the two best degrees, between the best
and its neighbours until they are ``FINEST`` of the GPUs apart; what is left trains, if it holds the
longest trajectory of the run. That is on the first seed; its ``FINALISTS``, and the
best of every part, are simulated on the others. The worst start is the worst of the first ones.

Regret is ``1 - libra / best static`` by throughput, seed by seed. What a start loses in any case is
that of a planner which is told the best static plan when libra looks for the first time, and goes
there with gradient workers, or as one group, or stays: what did best. A plan that may move pays
for it where it stays, too: its training GPUs are a base group and gradient workers, which load
versions and send gradients over the network, and a static plan's are one group. Limit: no row
bounds what is possible. They are the best of the plans that were simulated, a clairvoyant moves
between parts only, and libra, which moves when it likes, may do better. A static plan must hold the
longest trajectory of the whole run, and libra's the longest that it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from statistics import fmean
from typing import TypeAlias

from libra_cli.bench.clairvoyance import TOLD
from libra_cli.bench.config import ExperimentConfig, Progress
from libra_cli.bench.idle_servers import with_idle_servers
from libra_cli.bench.jobs import Job, first_layout_of, planned_run, playable, static_run
from libra_cli.bench.parallel import simulated
from libra_cli.bench.regret_causes import CAUSES, PlannedStep, shares_lost
from libra_cli.bench.results import (
    BEST_STATIC,
    CLAIRVOYANT,
    FREE_CLAIRVOYANT,
    LEAST_GAIN,
    LIBRA_TOLD,
    SHARED,
    ExperimentResult,
    Regret,
    ResultRow,
    Timeline,
    interval,
)
from libra_cli.core.costs.profile import MoveCost
from libra_cli.core.planning.rollout_table import DEFAULT_SEATS, PlannedBucket
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.planning.training_table import TrainingTable
from libra_cli.core.planning.transition import moves_cost_s
from libra_cli.core.types import Seconds
from libra_cli.sim.drift import Drift
from libra_cli.sim.traces import Trace

STEPS = 24
"""Optimizer steps of a run: five times as many as may be in flight."""
GPUS_A_GROUP = 3
"""GPUs for each group of a step: half of what other experiments have, for twice the runs."""
PARTS = 4
"""Parts of a run that have a plan each, in the clairvoyant's script."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs that serve in the static plans tried first."""
FINEST = 1 / 12
"""Share of the GPUs by which static plans differ at least: nearer ones differ by luck. Chosen."""
FINALISTS = 4
"""Best static plans of the first seed that are simulated on every other seed."""
STARTS = ("", "guess", "half", "worst")
"""Plans that libra begins with: its own first plan, that of a recipe which says nothing of lengths,
half of the GPUs, the worst plan tried first.
"""
TRADITIONAL, LIBRA = "uniform", "libra"

_Shape: TypeAlias = tuple[int, int]
"""Tensor-parallel degree and number of servers."""
_Static: TypeAlias = tuple[ResultRow, tuple[Seconds, ...]]
"""The result of a static plan, and the time at which each of its steps ended."""
_Runs: TypeAlias = dict[Layout, _Static]


def regret(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Compare libra from several starts with the bounds, for every trace and drift."""
    found = [playable(trace, config.max_len) for trace in config.traces]
    notes = [config.conditions, *(note for _, told in found for note in told)]
    cases = [
        _Case(_job(config, trace, drift), config.seeds)
        for trace, _ in found
        for drift in config.drifts
    ]
    _look_for_statics(cases, progress)
    jobs = [(case, seed, name, job) for case in cases for seed, name, job in case.contenders()]
    played = list(simulated(planned_run, [job for *_, job in jobs], progress))
    for (case, _, name, _), (row, timeline, steps) in zip(jobs, played, strict=True):
        case.keep(name, row, timeline)
        if name in _FROM_STARTS:
            case.explain(name, row, steps)
    return ExperimentResult(
        "regret of libra's plans",
        [row for case in cases for row in case.rows],
        [timeline for case in cases for timeline in case.timelines],
        notes + [case.note for case in cases],
        [one for case in cases for one in regrets(case.rows, case.causes, case.told)],
    )


def _job(config: ExperimentConfig, trace: Trace, drift: Drift) -> Job:
    """Return the job that every run of a trace and drift is derived from."""
    return replace(
        config.job(trace, steps=STEPS),
        planner="fixed",
        variant=str(drift),
        drift=drift,
        groups_per_step=max(1, config.gpus // GPUS_A_GROUP),
    )


# -- static plans ----------------------------------------------------------------------------------


class StaticPlans:
    """The plans of equal servers for one run, and which of them to simulate next."""

    def __init__(self, job: Job) -> None:
        self._gpus = job.gpus
        played = list(islice(job.groups(), job.steps * job.groups_per_step))
        work = job.work_of(played)
        self._profile, self._longest = job.profile, work.longest.context
        longest = job.max_len
        self.cut = sum(one.context > longest for group in played for one in group)
        self._trainers = TrainingTable(job.profile.training, work, job.gpus)
        self._degrees = [
            degree
            for degree, cost in job.profile.servers.items()
            if job.profile.serves(degree) and cost.kv_tokens >= self._longest
        ]

    def layout(self, shape: _Shape) -> Layout | None:
        """The plan with these servers, in which the other GPUs
        train; None where a half does not fit.
        """
        degree, servers = shape
        spare = self._gpus - degree * servers
        if servers < 1 or spare < 1:
            return None
        buckets = (PlannedBucket(degree, servers, self._longest, DEFAULT_SEATS),)
        fits = degree in self._degrees and self._trainers.fits(spare)
        return Layout(buckets, spare) if fits else None

    def shared(self, layouts: Iterable[Layout]) -> list[Layout]:
        """Return these plans with servers that take requests while the trainer waits, as far as
        memory holds them."""
        found = (
            with_idle_servers(one, self._profile, self._gpus, self._longest) for one in layouts
        )
        return [one for one in found if one is not None]

    def first(self) -> list[Layout]:
        """Every degree on ``SHARES`` of the GPUs, or on the most that leave enough to train on."""
        shapes = {
            (degree, max(1, round(share * self._gpus / degree)))
            for degree in self._degrees
            for share in SHARES
        }
        room = self._gpus - (self._trainers.least() or 0)
        shapes = {(degree, min(servers, room // degree)) for degree, servers in shapes}
        return self._layouts(sorted(shapes))

    def next(self, throughputs: Mapping[Layout, float]) -> list[Layout]:
        """The plans between the best and its neighbours of the two best degrees; none when done."""
        best: dict[int, tuple[float, int]] = {}
        for layout, throughput in throughputs.items():
            degree, servers = _shape(layout)
            best[degree] = max(best.get(degree, (0.0, 0)), (throughput, servers))
        degrees = sorted(best, key=lambda degree: -best[degree][0])[:2]
        tried = {_shape(layout) for layout in throughputs}
        wanted = [
            (degree, servers)
            for degree in degrees
            for servers in self._between(degree, best[degree][1], tried)
        ]
        return self._layouts(wanted)

    def _layouts(self, shapes: Sequence[_Shape]) -> list[Layout]:
        return [layout for shape in shapes if (layout := self.layout(shape)) is not None]

    def _between(self, degree: int, servers: int, tried: set[_Shape]) -> list[int]:
        others = [number for other, number in tried if other == degree]
        below = max([number for number in others if number < servers], default=0)
        above = min([number for number in others if number > servers], default=self._gpus // degree)
        finest = max(1.0, FINEST * self._gpus / degree)
        ends = [end for end in (below, above) if abs(end - servers) > finest]
        middles = {(end + servers) // 2 for end in ends}
        return sorted(number for number in middles if (degree, number) not in tried)


def _shape(layout: Layout) -> _Shape:
    bucket = layout.buckets[0]
    return bucket.tensor_parallel, bucket.servers


def _look_for_statics(cases: Sequence[_Case], progress: Progress) -> None:
    """Simulate static plans of all cases, side by side, until every case has its best."""
    wanted = [(case, 0, layout) for case in cases for layout in case.plans.first()]
    while wanted:
        _simulate(wanted, progress)
        wanted = [(case, 0, layout) for case in cases for layout in case.plans.next(case.ranking)]
    others = [
        (case, seed, layout)
        for case in cases
        for seed in range(1, len(case.static_runs))
        for layout in case.finalists()
    ]
    _simulate(others, progress)
    shared = [
        (case, seed, layout)
        for case in cases
        for layout in case.plans.shared(case.finalists())
        for seed in range(len(case.shared_runs))
    ]
    _simulate(shared, progress)


def _simulate(wanted: Sequence[tuple[_Case, int, Layout]], progress: Progress) -> None:
    jobs = [replace(case.job, seed=seed, layout=layout) for case, seed, layout in wanted]
    for (case, seed, layout), run in zip(
        wanted, simulated(static_run, jobs, progress), strict=True
    ):
        (case.shared_runs if layout.idle else case.static_runs)[seed][layout] = run


# -- one trace and drift ---------------------------------------------------------------------------


class _Case:
    """The runs of one trace and drift: static plans by seed, and the rows to show."""

    def __init__(self, job: Job, seeds: int) -> None:
        self.job = job
        self.plans = StaticPlans(job)
        self.static_runs: list[_Runs] = [{} for _ in range(seeds)]
        self.shared_runs: list[_Runs] = [{} for _ in range(seeds)]
        self.rows: list[ResultRow] = []
        self.timelines: list[Timeline] = []
        self.causes: dict[tuple[str, int], dict[str, float]] = {}
        #: Tokens a second of those that were told where to go, by name and seed.
        self.told: dict[tuple[str, int], float] = {}
        self._first = len(self.plans.first())

    @property
    def ranking(self) -> dict[Layout, float]:
        """Throughput of the static plans on the first seed."""
        return {layout: row.throughput_tok_s for layout, (row, _) in self.static_runs[0].items()}

    def finalists(self) -> list[Layout]:
        """The best static plans on the first seed, as a whole and of every part."""
        ranking, runs = self.ranking, self.static_runs[0]
        best = sorted(ranking, key=lambda layout: -ranking[layout])[:FINALISTS]
        parts = [
            min(runs, key=lambda layout: part_seconds(runs[layout][1])[at]) for at in range(PARTS)
        ]
        return list(dict.fromkeys([*best, *parts]))

    def contenders(self) -> list[tuple[int, str, Job]]:
        """Seed, name and job of what is still to be simulated."""
        return [
            (seed, name, job)
            for seed in range(len(self.static_runs))
            for name, job in self._of_seed(replace(self.job, seed=seed))
        ]

    def _of_seed(self, job: Job) -> Iterator[tuple[str, Job]]:
        yield from self._contenders(job).items()
        yield from self._told(job)

    def _contenders(self, job: Job) -> dict[str, Job]:
        runs = {layout: ended for layout, (_, ended) in self.static_runs[job.seed].items()}
        profile = job.profile
        search = Search(profile, job.workload, job.gpus, job.settings)

        def paid(today: Layout, then: Layout) -> Seconds:
            return moves_cost_s(search, today, then)

        free = replace(profile, moves=MoveCost(0.0, 0.0, 0.0, {}))
        script, loose = best_script(runs, paid), best_script(runs, lambda today, then: 0.0)
        moving = replace(job, planner=LIBRA)
        return {
            CLAIRVOYANT: _scripted(job, script),
            FREE_CLAIRVOYANT: replace(_scripted(job, loose), profile=free),
            LIBRA_TOLD: replace(moving, planner=TOLD),
            TRADITIONAL: replace(job, planner=TRADITIONAL),
            **{libra_from(start): replace(moving, start=self._start(start)) for start in STARTS},
        }

    def _told(self, job: Job) -> Iterator[tuple[str, Job]]:
        """Yield what goes to the best static plan at once, from every start, in both ways, and what
        stays with the start."""
        best = self._best(job.seed)
        own = first_layout_of(replace(job, planner=LIBRA), job.workload)
        for start in STARTS:
            begins = self._start(start) or own
            going = replace(job, planner=CLAIRVOYANT, start=begins)
            for plan, regroups in dict.fromkeys([(best, False), (best, True), (begins, False)]):
                yield _told_from(start), replace(going, script=(plan,), regroups=regroups)

    def _start(self, start: str) -> Layout | None:
        if start == "half":
            return first_layout_of(replace(self.job, planner=TRADITIONAL), self.job.workload)
        if start == "guess":
            return first_layout_of(replace(self.job, planner=LIBRA), self.job.guessed)
        first = list(self.ranking.items())[: self._first]
        return min(first, key=lambda pair: pair[1])[0] if start else None

    def keep(self, name: str, row: ResultRow, timeline: Timeline | None) -> None:
        """Take in what became of a contender; the seed's best static plan comes before it."""
        if name in _TOLD:
            other = self.told.get((name, row.seed), 0.0)
            self.told[name, row.seed] = max(other, row.throughput_tok_s)
            return
        best = self._best(row.seed)
        if not any((kept.planner, kept.seed) == (BEST_STATIC, row.seed) for kept in self.rows):
            self.rows.append(replace(self.static_runs[row.seed][best][0], planner=BEST_STATIC))
            if shared := [run for run, _ in self.shared_runs[row.seed].values()]:
                most = max(shared, key=lambda run: run.throughput_tok_s)
                self.rows.append(replace(most, planner=SHARED))
        at_least = {CLAIRVOYANT: BEST_STATIC, FREE_CLAIRVOYANT: CLAIRVOYANT}.get(name)
        known = [kept for kept in self.rows if (kept.planner, kept.seed) == (at_least, row.seed)]
        row = max(row, *known, key=lambda one: one.throughput_tok_s) if known else row
        self.rows.append(replace(row, planner=name))
        if timeline is not None:
            self.timelines.append(replace(timeline, planner=name))

    def explain(self, name: str, row: ResultRow, steps: Sequence[PlannedStep]) -> None:
        """Divide what a run of libra's lost to the seed's best static plan by cause."""
        layout = self._best(row.seed)
        best, ended = self.static_runs[row.seed][layout]
        self.causes[name, row.seed] = shares_lost(
            steps, row, best, ended, servers=layout.servers, filling=round(self.job.overlap)
        )

    def _best(self, seed: int) -> Layout:
        runs = self.static_runs[seed]
        return max(runs, key=lambda layout: runs[layout][0].throughput_tok_s)

    @property
    def note(self) -> str:
        """A sentence on which static plans are the bounds, and of how many."""
        runs = {layout: ended for layout, (_, ended) in self.static_runs[0].items()}
        script = best_script(runs, lambda today, then: 0.0)
        best, worst = self._best(0), self._start("worst")
        return (
            f"{self.job.trace.name}, {self.job.variant}: of {len(runs)} static plans simulated on "
            f"the first seed the best is {best}, and the worst of the first {self._first} {worst}; "
            f"GPUs that serve, part by part, where moves are free: "
            f"{', '.join(str(layout.rollout_gpus) for layout in script)}; "
            f"{self.plans.cut} trajectories are cut at {self.job.max_len:,} tokens"
        )


def libra_from(start: str) -> str:
    """Return the name in the rows of libra from this start."""
    return f"{LIBRA}, {start} start" if start else LIBRA


_FROM_STARTS = tuple(map(libra_from, STARTS))


def _told_from(start: str) -> str:
    """Return the name of what is told the best static plan, from this start."""
    return f"told, {start or 'own'} start"


_TOLD = tuple(map(_told_from, STARTS))


def _scripted(job: Job, script: tuple[Layout, ...]) -> Job:
    return replace(job, planner=CLAIRVOYANT, start=script[0], script=script)


# -- the clairvoyant's script ----------------------------------------------------------------------


def part_seconds(ended: Sequence[Seconds]) -> list[Seconds]:
    """Seconds of each of ``PARTS`` equal parts of a run, whose steps ended then."""
    borders = [0.0, *(ended[len(ended) * (at + 1) // PARTS - 1] for at in range(PARTS))]
    return [end - start for start, end in pairwise(borders)]


def best_script(
    runs: Mapping[Layout, Sequence[Seconds]], cost_s: Callable[[Layout, Layout], Seconds]
) -> tuple[Layout, ...]:
    """The plan of each part with which all parts and the moves between them take the least.

    ``runs`` say when the steps of each static plan ended. A shortest path through the parts.
    """
    seconds = {layout: part_seconds(ended) for layout, ended in runs.items()}
    paths: dict[Layout, tuple[Seconds, tuple[Layout, ...]]] = {
        layout: (parts[0], (layout,)) for layout, parts in seconds.items()
    }
    for at in range(1, PARTS):
        paths = {
            then: min(
                (
                    (took + cost_s(path[-1], then) + parts[at], (*path, then))
                    for took, path in paths.values()
                ),
                key=lambda found: found[0],
            )
            for then, parts in seconds.items()
        }
    return min(paths.values(), key=lambda found: found[0])[1]


# -- what it comes to ------------------------------------------------------------------------------


def regrets(
    rows: Sequence[ResultRow],
    causes: Mapping[tuple[str, int], Mapping[str, float]],
    told: Mapping[tuple[str, int], float],
) -> list[Regret]:
    """Return libra's regret on one trace and drift, from each of its starts.

    ``causes`` are ``shares_lost`` of the runs, by their planner's name and seed, and ``told`` the
    tokens a second of what was told the best static plan.
    """
    by_name: dict[str, dict[int, ResultRow]] = {}
    for row in rows:
        by_name.setdefault(row.planner, {})[row.seed] = row
    static, half = by_name[BEST_STATIC], by_name[TRADITIONAL]
    found = []
    for start in STARTS:
        name = libra_from(start)
        mine = by_name[name]
        losses = _differences(static, mine, "throughput_tok_s")
        gains = _differences(mine, half, "throughput_tok_s", whole=half)
        row = next(iter(mine.values()))
        most = [told[_told_from(start), seed] for seed in mine]
        unit = fmean(each.throughput_tok_s for each in static.values())
        found.append(
            Regret(
                trace=row.trace,
                variant=row.variant,
                start=start or "own",
                seeds=len(mine),
                regret=fmean(losses),
                ci95=interval(losses),
                of_start=1.0 - fmean(most) / unit,
                steady_regret=fmean(_differences(static, mine, "steady_tok_s")),
                share_of_clairvoyant=_share(static, mine, by_name[CLAIRVOYANT]),
                over_uniform=fmean(gains),
                moves=fmean(one.moves for one in mine.values()),
                causes=_mean_causes(static, {seed: causes[name, seed] for seed in mine}),
            )
        )
    return found


def _mean_causes(
    static: Mapping[int, ResultRow], causes: Mapping[int, Mapping[str, float]]
) -> dict[str, float]:
    """Return the means over the seeds, of shares of the mean throughput as regret is."""
    unit = fmean(row.throughput_tok_s for row in static.values())
    weights = {seed: static[seed].throughput_tok_s / unit for seed in causes}
    return {
        cause: fmean(weights[seed] * lost[cause] for seed, lost in causes.items())
        for cause in CAUSES
    }


def _differences(
    ours: Mapping[int, ResultRow],
    theirs: Mapping[int, ResultRow],
    metric: str,
    *,
    whole: Mapping[int, ResultRow] | None = None,
) -> list[float]:
    """Return ours minus theirs, seed by seed, as shares of the mean of ``whole`` (ours without)."""
    unit = fmean(row.metric(metric) for row in (whole or ours).values())
    return [(ours[seed].metric(metric) - theirs[seed].metric(metric)) / unit for seed in ours]


def _share(
    static: Mapping[int, ResultRow], mine: Mapping[int, ResultRow], seer: Mapping[int, ResultRow]
) -> float | None:
    """Return libra's part of what the clairvoyant gains over the best
    static plan; None if that is little.
    """
    metric = "throughput_tok_s"
    possible = fmean(_differences(seer, static, metric, whole=static))
    if possible < LEAST_GAIN:
        return None
    return fmean(_differences(mine, static, metric, whole=static)) / possible
