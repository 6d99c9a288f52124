"""Where moving pays: the best plans in hindsight that move and that stay, and libra's own.

    python -m tests.research.moving --trace moatless --gpus 24,48 --bound 1,2 --seeds 3 \\
        --drift "contexts:1/4 filtered:0/0.7 1/4 tools:1/20" --out moving.jsonl

Of each circumstance the same groups are played under these plans, in virtual time:

    stays      the best static plan, found as ``libra bench regret`` finds it
    moves      the best static plan of each quarter of the run, one after the other, chosen in
               hindsight with moves paid or for nothing, and simulated with their real price; or
               ``stays`` where neither did better
    libra      libra's planner from its own first plan
    kept       libra's own first plan, which nothing changes

Every run is a line of ``--out``, and one that is there is not simulated again: the command may be
interrupted and given again. It ends with a table of differences in throughput, paired by seed, in
per cent, ± 95 % over the seeds.

Limit: neither bound is the best there is. A clairvoyant moves between quarters only, as whole
servers of one shape, and ``stays`` has the trainer in one group, which is quicker than a base group
and workers that could change sides.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from libra_cli.bench.conditions import NETWORK, PROFILE
from libra_cli.bench.config import parse_drift
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.parallel import simulated
from libra_cli.bench.regret import (
    FINALISTS,
    GPUS_A_GROUP,
    PARTS,
    STEPS,
    StaticPlans,
    best_script,
    part_seconds,
)
from libra_cli.bench.results import CLAIRVOYANT, interval
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.planning.transition import moves_cost_s
from libra_cli.core.types import Seconds
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace

COLUMNS = {"moves / stays": ("moves", "stays"), "libra / stays": ("libra", "stays")}
COLUMNS |= {"libra / kept": ("libra", "kept")}
SCRIPTS = ("paid", "free")
"""Whether the parts of a script were chosen with moves paid."""


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated run: its tokens a second, the moves of servers, when each step ended (s)."""

    throughput: float
    moves: int
    ended: tuple[Seconds, ...]


Runs: TypeAlias = dict[str, Run]
"""Runs that are done, by the key of their job."""


def played(job: Job) -> Run:
    """Simulate one run."""
    tape = world_of(job).run()
    servers = sum("rollout" in (move.from_role, move.to_role) for move in tape.moves.values())
    tokens = sum(step.generated_tokens for step in tape.steps)
    return Run(tokens / tape.ended_at, servers, tuple(step.ended_at for step in tape.steps))


def key_of(job: Job) -> str:
    """Return what tells a job from others in the file of runs."""
    plans = [str(each) for each in (job.layout, *job.script) if each is not None]
    about = (job.trace.name, job.profile.name, job.gpus, f"bound {job.bound}", job.variant)
    return " | ".join(map(str, (*about, f"seed {job.seed}", job.planner, *plans)))


@dataclass(slots=True)
class Case:
    """A circumstance: the runs that it needs next, and what they came to."""

    job: Job
    seeds: int
    done: Runs
    plans: StaticPlans = field(init=False)
    tried: list[Layout] = field(init=False)

    def __post_init__(self) -> None:
        self.plans = StaticPlans(self.job)
        self.tried = self.plans.first()

    def wanted(self) -> list[Job]:
        """The jobs to simulate next; empty when all is known."""
        first = self._missing(self._static(0, layout) for layout in self.tried)
        if first:
            return first
        if more := self.plans.next(self._ranking):
            self.tried += more
            return self.wanted()
        rest = [self._static(seed, each) for seed in self._seeds for each in self.finalists]
        rest += [self._job(seed, name) for seed in self._seeds for name in ("libra", "static-best")]
        return self._missing(rest) or self._missing(
            self._scripted(seed, kind) for seed in self._seeds for kind in SCRIPTS
        )

    @property
    def finalists(self) -> list[Layout]:
        """The best static plans of the first seed, of the whole run and of each part."""
        ended = {each: self.done[key_of(self._static(0, each))].ended for each in self.tried}
        best = sorted(self.tried, key=lambda each: -self._ranking[each])[:FINALISTS]
        parts = [min(ended, key=lambda each: part_seconds(ended[each])[at]) for at in range(PARTS)]
        return list(dict.fromkeys([*best, *parts]))

    def outcome(self, seed: int) -> dict[str, Run]:
        """What became of each contender on a seed."""

        def run(job: Job) -> Run:
            return self.done[key_of(job)]

        stays = max((run(self._static(seed, each)) for each in self.finalists), key=_speed)
        scripted = [run(self._scripted(seed, kind)) for kind in SCRIPTS]
        return {
            "stays": stays,
            "moves": max([stays, *scripted], key=_speed),
            "libra": run(self._job(seed, "libra")),
            "kept": run(self._job(seed, "static-best")),
        }

    @property
    def _seeds(self) -> range:
        return range(self.seeds)

    @property
    def _ranking(self) -> dict[Layout, float]:
        return {each: self.done[key_of(self._static(0, each))].throughput for each in self.tried}

    def _missing(self, jobs: Iterable[Job]) -> list[Job]:
        distinct = {key_of(job): job for job in jobs}
        return [job for key, job in distinct.items() if key not in self.done]

    def _job(self, seed: int, planner: str) -> Job:
        return replace(self.job, seed=seed, planner=planner)

    def _static(self, seed: int, layout: Layout) -> Job:
        return replace(self.job, seed=seed, layout=layout)

    def _scripted(self, seed: int, kind: str) -> Job:
        ended = {each: self.done[key_of(self._static(seed, each))].ended for each in self.finalists}
        job = self.job
        search = Search(job.profile, job.workload, job.gpus, job.settings)

        def cost_s(today: Layout, then: Layout) -> Seconds:
            if kind == "free":
                return 0.0
            return moves_cost_s(search, today, then)

        script = best_script(ended, cost_s)
        return replace(self._job(seed, CLAIRVOYANT), start=script[0], script=script)


def _speed(run: Run) -> float:
    return run.throughput


def cases_of(typed: Any, done: Runs) -> Iterator[Case]:
    """The circumstances that were asked for."""
    profile = load_profile(typed.profile).on_network(NETWORK)
    for gpus in map(int, typed.gpus.split(",")):
        longest = longest_of(profile, gpus)
        for name in typed.trace.split(","):
            trace, _ = playable(load_trace(name), longest)
            for bound in map(int, typed.bound.split(",")):
                for text in typed.drift.split():
                    drift = parse_drift(text, longest)
                    job = Job(trace, profile, profile, gpus, "libra", "fixed", 0, steps=STEPS)
                    job = replace(job, drift=drift, bound=bound, variant=str(drift))
                    yield Case(
                        replace(job, groups_per_step=gpus // GPUS_A_GROUP), typed.seeds, done
                    )


def differences(outcomes: Sequence[Mapping[str, Run]], ours: str, theirs: str) -> str:
    """Return the mean of ours over theirs, less 1, in per cent, with half a 95 % interval."""
    found = [100 * (one[ours].throughput / one[theirs].throughput - 1) for one in outcomes]
    span = interval(found)
    return f"{fmean(found):+.1f}" + (f" ± {span[1] - fmean(found):.1f}" if span else "")


def row(case: Case) -> str:
    """Return the line of a circumstance in the table."""
    job, outcomes = case.job, [case.outcome(seed) for seed in range(case.seeds)]
    told = [differences(outcomes, *pair) for pair in COLUMNS.values()]
    moved = [fmean(one[name].moves for one in outcomes) for name in ("moves", "libra")]
    about = f"{job.trace.name.partition('_')[0]}, {job.gpus}, {job.bound}, {job.variant}"
    return f"| {about} | {' | '.join(told)} | {moved[0]:.0f}, {moved[1]:.0f} |"


def read(path: Path) -> Runs:
    """The runs of a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    found = (json.loads(line) for line in lines)
    return {key: Run(speed, moves, tuple(ended)) for key, speed, moves, ended in found}


def simulate(cases: Sequence[Case], done: Runs, path: Path, say: Callable[[str], None]) -> None:
    """Simulate what is missing, of all cases side by side, and write it down run by run."""
    while jobs := [job for case in cases for job in case.wanted()]:
        with path.open("a", encoding="utf-8") as file:
            for job, run in zip(jobs, simulated(played, jobs, say), strict=True):
                done[key_of(job)] = run
                file.write(json.dumps([key_of(job), *astuple(run)]) + "\n")
                file.flush()


def main() -> None:
    """The command."""
    parser = ArgumentParser(prog="python -m tests.research.moving")
    parser.add_argument("--trace", default="moatless")
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--gpus", default="24")
    parser.add_argument("--bound", default="1")
    parser.add_argument("--drift", default="contexts:1/4 filtered:0/0.7 1/4 tools:1/20")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("moving.jsonl"))
    typed = parser.parse_args()
    done = read(typed.out)
    cases = list(cases_of(typed, done))
    simulate(cases, done, typed.out, lambda text: None)
    write = sys.stdout.write
    write(f"| trace, GPUs, bound, what changes | {' | '.join(COLUMNS)} | servers moved |\n")
    write("|" + (len(COLUMNS) + 2) * " --- |" + "\n")
    for case in cases:
        write(row(case) + "\n")


if __name__ == "__main__":
    main()
