"""A staleness bound that is chosen, beside bounds that are fixed: real runs on this machine's CPU.

    python -m tests.research.chosen_bound_live --out bounds.jsonl --seeds 5
    python -m tests.research.chosen_bound_live --out bounds.jsonl --table

Each seed plays the quickstart, with tools that take up to 2 s and seats for every trajectory, once
with ``training.staleness: auto``, begun at 1, and once under bounds fixed at 1 and at 2; who goes
first changes from seed to seed. Told are the seconds from the first step's end to the last one's,
and to a mean reward of 0.8 over five steps, and the mean reward of all steps and of the last ten.
Runs that are in the file are not done again. The cores have to be idle for the seconds to count.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from libra_cli.api import load_run
from libra_cli.bench.results import interval
from libra_cli.core.records import DecisionRecord
from libra_cli.runtime.recipes.yaml_lines import read_yaml
from libra_cli.runtime.store.reader import Reader
from tests.research.kept_cache import RECIPE, played

ARMS: dict[str, dict[str, Any]] = {
    "1": {"max_staleness": 1},
    "2": {"max_staleness": 2},
    "auto": {"max_staleness": 1, "staleness": "auto"},
}
TOOLS = {"latency_s": {"median": 0.05, "most": 2.0}}
SEATS = 256
GOAL, OVER, LAST = 0.8, 5, 10
"""A reward, the steps that it is the mean of, and the steps at the end."""


def recipe_of(arm: str, steps: int) -> dict[str, Any]:
    """The recipe of an arm."""
    data: dict[str, Any] = read_yaml(RECIPE.read_text(encoding="utf-8")).value
    data["run"] |= {"name": f"bound-{arm}", "steps": steps}
    data["environment"]["args"] = TOOLS
    data["rollout"]["buckets"][0]["max_num_seqs"] = SEATS
    data["training"] |= ARMS[arm]
    return data


def told_of(run_dir: Path) -> dict[str, Any]:
    """The numbers of a run that has ended."""
    run = load_run(run_dir)
    with Reader(run_dir) as reader:
        bounds = [row.bound for row in reader.rows(DecisionRecord) if row.bound is not None]
    rewards = [step.metrics["reward/mean"] for step in run.steps]
    ended = [step.ended_at for step in run.steps]
    reached = (
        at - ended[0]
        for number, at in enumerate(ended, start=1)
        if number >= OVER and fmean(rewards[number - OVER : number]) >= GOAL
    )
    return {
        "steps_s": ended[-1] - ended[0],
        "reward": fmean(rewards),
        "last_reward": fmean(rewards[-LAST:]),
        "goal_s": next(reached, None),
        "bounds": bounds,
    }


def table(runs: Sequence[Mapping[str, Any]], steps: int) -> Iterator[str]:
    """Lines of Markdown of runs of so many steps: means of each arm, and how far auto is from fixed
    bounds, by pairs. Seeds in which one arm does not reach the goal are left out of its seconds."""
    by_seed: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        if run["steps"] != steps:
            continue
        by_seed.setdefault(run["seed"], {})[run["arm"]] = run
    whole = [arms for arms in by_seed.values() if arms.keys() == ARMS.keys()]
    yield "| | " + " | ".join(ARMS) + " | auto - 1 | auto - 2 | seeds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in ("steps_s", "reward", "last_reward", "goal_s"):
        told = [arms for arms in whole if all(run[name] is not None for run in arms.values())]
        if not told:
            continue
        means = [f"{fmean(arms[arm][name] for arms in told):.4g}" for arm in ARMS]
        apart = [_apart([arms["auto"][name] - arms[arm][name] for arms in told]) for arm in "12"]
        yield f"| {name} | " + " | ".join((*means, *apart, str(len(told)))) + " |"


def _apart(differences: Sequence[float]) -> str:
    span = interval(differences)
    about = f" ({span[0]:+.3g} to {span[1]:+.3g})" if span else ""
    return f"{fmean(differences):+.3g}{about}"


def main() -> None:
    """Do the runs that are not in the file, or print the table of those that are."""
    parser = ArgumentParser(prog="python -m tests.research.chosen_bound_live")
    parser.add_argument("--out", type=Path, default=Path("bounds.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--table", action="store_true")
    typed = parser.parse_args()
    lines = typed.out.read_text(encoding="utf-8").splitlines() if typed.out.is_file() else []
    runs = [json.loads(line) for line in lines]
    if typed.table:
        sys.stdout.write("\n".join(table(runs, typed.steps)) + "\n")
        return
    done = {(run["seed"], run["arm"], run["steps"]) for run in runs}
    for seed in range(typed.seeds):
        first = seed % len(ARMS)
        for arm in (*list(ARMS)[first:], *list(ARMS)[:first]):
            if (seed, arm, typed.steps) not in done:
                result = {"seed": seed, "arm": arm, "steps": typed.steps}
                result |= played(recipe_of(arm, typed.steps), seed, told_of)
                with typed.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
