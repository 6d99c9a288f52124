"""``staleness: auto`` beside every fixed bound, in the simulator, with libra's planner in each.

python -m tests.research.chosen_bound --trace tau2 --trace mint --decays 0.02,0.2 [--seeds 5]

Told are the tokens of age 0 that those trained are worth, a second: what a step teaches for its
time, where a token is worth exp(-decay) times as much with each version that it is behind. A fixed
bound plays the same run at whatever decay. The run that chooses begins at ``--first``.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean

import typer

from libra_cli.bench.conditions import NETWORK, PROFILE
from libra_cli.bench.config import parse_drift
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.parallel import simulated
from libra_cli.bench.results import interval
from libra_cli.config.training import AUTO_BOUNDS
from libra_cli.core.token_worth import step_worth
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated run: tokens trained by age in versions, its seconds, and its last bound."""

    trace: str
    seed: int
    rule: str
    decay: float | None
    """None where the run does not depend on it."""
    tokens: dict[str, float]
    seconds: float
    bound: int

    def taught_a_second(self, decay: float) -> float:
        """Tokens of age 0 that those trained are worth, a second."""
        worth = sum(n * exp(-decay * int(age)) for age, n in self.tokens.items())
        return worth / self.seconds


def arguments() -> Namespace:
    """What was typed."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--trace", action="append", required=True)
    add("--gpus", type=int, default=24)
    add("--steps", type=int, default=24)
    add("--groups", type=int, default=16, help="a step")
    add("--seeds", type=int, default=5, help="how many, from 0 on")
    add("--first", type=int, default=1, help="the bound that auto begins with")
    add("--decays", default="0.02,0.2", help="nats a version")
    add("--drift", default="none")
    add("--out", type=Path, default=Path("chosen-bound.jsonl"))
    return parser.parse_args()


def jobs_of(asked: Namespace, decays: Sequence[float]) -> Iterator[Job]:
    """Every fixed bound, and one that chooses for each decay, of each trace and seed."""
    profile = load_profile(PROFILE).on_network(NETWORK)
    longest = longest_of(profile, asked.gpus)
    for name in asked.trace:
        trace, _ = playable(load_trace(name), longest)
        blank = Job(trace, profile, profile, asked.gpus, "libra", "libra", 0, steps=asked.steps)
        drift = parse_drift(asked.drift, longest)
        blank = replace(blank, drift=drift, groups_per_step=asked.groups)
        for seed in range(asked.seeds):
            for bound in AUTO_BOUNDS:
                yield replace(blank, seed=seed, bound=bound, variant=str(bound))
            for decay in decays:
                own = replace(blank, seed=seed, bound=asked.first, decay=decay, variant=AUTO)
                yield replace(own, staleness=AUTO)


def run_of(job: Job) -> Run:
    """Simulate one run."""
    world = world_of(job)
    tape = world.run()
    tokens: dict[str, float] = {}
    for step in tape.steps:
        told = step_worth(step.metrics)
        for one in told.ages if told else ():
            tokens[str(one.age)] = tokens.get(str(one.age), 0.0) + one.tokens
    decay = job.decay if job.variant == AUTO else None
    last = world.machine.ledger.rule.bound
    return Run(job.trace.name, job.seed, job.variant, decay, tokens, tape.ended_at, last)


def table(runs: Sequence[Run], decays: Sequence[float]) -> Iterator[str]:
    """Lines: each bound, and auto beside the best fixed one of its trace, paired by seed."""
    for trace in dict.fromkeys(run.trace for run in runs):
        for decay in decays:
            mine = [r for r in runs if r.trace == trace and r.decay in (None, decay)]
            rates: dict[str, dict[int, float]] = {}
            for run in mine:
                rates.setdefault(run.rule, {})[run.seed] = run.taught_a_second(decay)
            chosen = rates.pop(AUTO)
            means = {rule: fmean(found.values()) for rule, found in rates.items()}
            best = max(means, key=lambda rule: means[rule])
            told = ", ".join(f"{rule}: {mean:,.0f}" for rule, mean in means.items())
            ended = sorted(run.bound for run in mine if run.rule == AUTO)
            yield f"{trace}, decay {decay:g}: {told}, auto: {fmean(chosen.values()):,.0f}"
            for rule, found in rates.items():
                gains = [chosen[seed] / found[seed] - 1 for seed in chosen]
                spread = interval(gains)
                sure = "" if spread is None else f" ± {50 * (spread[1] - spread[0]):.1f}"
                note = ", the best fixed one" if rule == best else ""
                yield f"    auto beside bound {rule}: {100 * fmean(gains):+.1f}{sure} %{note}"
            yield f"    ended at bounds {', '.join(map(str, ended))}"


def main() -> None:
    """Simulate, write every run, and print the table."""
    asked = arguments()
    decays = [float(one) for one in asked.decays.split(",")]
    runs = []
    with asked.out.open("w") as file:
        for run in simulated(run_of, list(jobs_of(asked, decays)), lambda text: None):
            runs.append(run)
            file.write(json.dumps(asdict(run)) + "\n")
            file.flush()
    typer.echo("\n".join(table(runs, decays)))


if __name__ == "__main__":
    main()
