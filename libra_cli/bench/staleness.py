"""The rules that make a batch, beside one another: what each is worth, and what it trains.

One plan for all, ``uniform`` of ``core.planning.baselines``: half of the GPUs to each side, in
servers of four; nothing moves. Of each trace, bound and seed every rule plays the same groups in
the same order. Beside throughput stand what it costs in age (over generated tokens, versions behind
the step that trains on them) and in bias: how many of the longest tenth of all members of trained
groups were trained. ``later`` are those that were still played when the run ended, after their
group had been closed; ``lost`` were given up. ``token`` makes the batches that ``soft`` makes, and
leaves the tokens over the bound out of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from libra_cli.bench.conditions import Conditions
from libra_cli.bench.config import RULES, BenchError, Progress, parse_drift, parse_names
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.parallel import simulated
from libra_cli.core.types import Tokens, TrajectoryId
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import DEFAULT_TRACE, Trace, load_trace
from libra_cli.sim.world import World

LONGEST = 0.1
"""The share of all trajectories that is called the longest."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """The result of one run under one rule.

    Shares are 0 to 1, ages in versions, lengths in generated tokens.
    """

    rule: str
    bound: int
    trace: str
    seed: int
    throughput_tok_s: float
    over_bound: float
    """The share of trained tokens over the bound."""
    age_mean: float
    age_max: int
    waited: float
    """The share of the time in which the trainer had no batch."""
    closed: float
    """The share of trained groups that were closed before all members were finished."""
    longest_trained: float
    longest_later: float
    longest_lost: float
    played_length: float
    """Mean generated tokens over all members of trained groups."""
    trained_length: float


def staleness(
    asked: Conditions, rules: str, bounds: str, *, steps: int, progress: Progress
) -> list[RuleRow]:
    """Rules on a fixed plan, half of the GPUs serving; of ``asked`` no policy, planner or rule.

    Raises:
        BenchError: an unknown rule, or a bound that is no number.
        TraceError: a trace that cannot be read.
    """
    names = parse_names("rule", rules, tuple(RULES))
    jobs = [
        replace(job, staleness=RULES[name], variant=name)
        for trace in asked.traces or (DEFAULT_TRACE,)
        for job in _jobs(load_trace(trace), asked, _bounds(bounds), steps)
        for name in names
    ]
    return list(simulated(_row, jobs, progress))


def _bounds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(
            f"--bounds {text!r} is not a list of numbers of versions", hint="--bounds 1,2,4"
        ) from error


def _jobs(trace: Trace, asked: Conditions, bounds: Sequence[int], steps: int) -> Iterator[Job]:
    profile, gpus = load_profile(asked.profile).on_network(asked.network), asked.gpus
    longest = longest_of(profile, gpus)
    fits, _ = playable(trace, longest)
    blank = Job(fits, profile, profile, gpus, "libra", "uniform", 0, steps=steps)
    blank = replace(blank, drift=parse_drift(asked.drift, longest))
    for bound in bounds:
        for seed in range(asked.seeds):
            yield replace(blank, bound=bound, seed=seed)


def _row(job: Job) -> RuleRow:
    world = world_of(job)
    world.run()
    tape = world.recording
    steps = [(step.generated_tokens, step.batch) for step in tape.steps]
    tokens = sum(count for count, _ in steps)
    lengths = _Lengths.of(world, job.group_size)
    return RuleRow(
        rule=job.variant,
        bound=job.bound,
        trace=job.trace.name,
        seed=job.seed,
        throughput_tok_s=tokens / tape.steps[-1].ended_at,
        over_bound=sum(metrics["tokens_over_bound"] or 0 for _, metrics in steps) / tokens,
        age_mean=sum(n * (metrics["token_staleness_mean"] or 0) for n, metrics in steps) / tokens,
        age_max=int(max(metrics["token_staleness_max"] or 0 for _, metrics in steps)),
        waited=tape.idle_train,
        closed=fmean((metrics["groups_closed"] or 0) for _, metrics in steps) / job.groups_per_step,
        longest_trained=lengths.share(lengths.trained),
        longest_later=lengths.share(lengths.later),
        longest_lost=lengths.share(lengths.lost),
        played_length=fmean([*lengths.trained, *lengths.later, *lengths.lost]),
        trained_length=fmean(lengths.trained),
    )


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The lengths of all members of trained groups: trained, to be trained later, or lost."""

    trained: list[Tokens]
    later: list[Tokens]
    lost: list[Tokens]

    @classmethod
    def of(cls, world: World, group_size: int) -> _Lengths:
        tape = world.recording
        found = cls([], [], [])
        for group in tape.groups:
            for member in range(group_size):
                length = world.episode(TrajectoryId(group, member)).generated
                if tape.late.get((group, member), 0) is None:
                    found.later.append(length)
                elif (group, member) in tape.dropped:
                    found.lost.append(length)
                else:
                    found.trained.append(length)
        return found

    def share(self, some: Sequence[Tokens]) -> float:
        """Return which share of the longest members is among ``some``."""
        every = sorted([*self.trained, *self.later, *self.lost])
        least = every[int((1 - LONGEST) * (len(every) - 1))]
        longest = sum(length >= least for length in every)
        return sum(length >= least for length in some) / longest
