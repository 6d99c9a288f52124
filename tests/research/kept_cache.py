"""What learning and servers have of a KV cache that is kept over loads, beside one that is cleared.

    python -m tests.research.kept_cache --out kept.jsonl --seeds 3
    python -m tests.research.kept_cache --out kept.jsonl --table
    python -m tests.research.kept_cache --simulated tau2 mint

Pairs of real runs on this machine's CPU, alike but for ``weight_sync.clear_cache``; who goes first
changes from seed to seed. Both learn pointer-chase:

    quickstart    the recipe as it is: 1 to 8 hops, staleness 1
    long          4 to 8 hops, a tool that takes up to 1 s, staleness 4: a trajectory is met by
                  several loads, between its turns and within them

Simulated pairs play the same recorded trajectories on 24 GPUs of a profile, with the planner's own
split; of each the tokens a second and the tokens computed again, a generated token.

Blocks of the cache have 32 tokens: of vLLM's 128 on CPUs, contexts this short fill few.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from libra_cli.api import load_run
from libra_cli.bench.contenders import Future, contender
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.results import interval
from libra_cli.config.recipe import Recipe
from libra_cli.runtime.recipes.yaml_lines import read_yaml
from libra_cli.runtime.store.reader import Reader
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from libra_cli.sim.world import World

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
LONG = {"hop_weights": [0, 0, 0, 1, 1, 1, 1, 1], "latency_s": {"median": 0.1, "most": 1.0}}
GPUS = 24
LAST = 10
"""Steps at the end whose mean reward is the final one."""
MEANS = (
    "staleness/token_mean",
    "train/logprob_gap",
    "train/rollout_kl",
    "train/clip_frac",
    "train/ess",
    "rollout_ratio/below_half",
    "rollout_ratio/above_2",
    "time/step",
)
"""Metrics of steps whose means are told."""


def recipe_of(task: str, steps: int, *, clear: bool) -> dict[str, Any]:
    """The recipe of an arm."""
    data: dict[str, Any] = read_yaml(RECIPE.read_text(encoding="utf-8")).value
    data["run"] |= {"name": f"{task}-{'cleared' if clear else 'kept'}", "steps": steps}
    data["weight_sync"] = {"clear_cache": clear}
    data["rollout"]["vllm_args"] = ["--block-size", "32"]
    if task == "long":
        data["environment"]["args"] = LONG
        data["training"]["max_staleness"] = 4
    return data


def played(
    recipe: Mapping[str, Any], seed: int, told: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Run a recipe in a directory that goes with it, and return what is ``told`` of the run's."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "recipe.json"
        file.write_text(json.dumps(recipe), encoding="utf-8")
        libra = Path(sys.executable).with_name("libra")
        command = [str(libra), "run", str(file), "--seed", str(seed)]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        (run_dir,) = (path.parent for path in Path(place).glob("runs/*/recipe.json"))
        return told(run_dir)


def told_of(run_dir: Path) -> dict[str, Any]:
    """The numbers of a run that has ended."""
    steps = [row.metrics for row in load_run(run_dir).steps]
    rewards = [step["reward/mean"] for step in steps]
    with Reader(run_dir) as reader:
        loads = [sync.load_s for sync in reader.syncs() if sync.verified and sync.version]
        (server,) = reader.latest_samples().values()
    means = {name: fmean(step[name] for step in steps if name in step) for name in MEANS}
    return {
        "rewards": [round(one, 4) for one in rewards],
        "area": fmean(rewards),
        "final": fmean(rewards[-LAST:]),
        **means,
        "loads": len(loads),
        "paused_s": fmean(loads),
        "prefill_per_generated": (server.metrics["prefill_tokens"] or 0) / server.generated_tokens,
    }


def wanted(typed: Namespace) -> Iterator[dict[str, Any]]:
    """The runs, the two of a pair one after the other."""
    for seed in range(typed.seeds):
        for task in typed.tasks:
            for clear in (True, False) if seed % 2 == 0 else (False, True):
                yield {"task": task, "steps": typed.steps, "seed": seed, "clear": clear}


def table(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: means of cleared and kept, and the differences of pairs with intervals."""
    yield "| task | | cleared | kept | kept - cleared, 95 % | seeds |"
    yield f"|{6 * ' --- |'}"
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    for task in dict.fromkeys(run["task"] for run in runs):
        by_seed: dict[int, dict[bool, Mapping[str, Any]]] = {}
        for run in runs:
            if run["task"] == task:
                by_seed.setdefault(run["seed"], {})[run["clear"]] = run
        pairs = [(pair[True], pair[False]) for pair in by_seed.values() if len(pair) == 2]
        for name in names if pairs else ():
            apart = [kept[name] - cleared[name] for cleared, kept in pairs]
            span = interval(apart)
            half = f" ± {span[1] - fmean(apart):.2g}" if span else ""
            means = (f"{fmean(pair[arm][name] for pair in pairs):.4g}" for arm in (0, 1))
            told = " | ".join((*means, f"{fmean(apart):+.2g}{half}", str(len(pairs))))
            yield f"| {task} | {name} | {told} |"


def simulated(trace: str, seed: int, *, clear: bool) -> tuple[float, float]:
    """Trained tokens a second of virtual time, and tokens computed again for each generated."""
    profile = load_profile("a800-qwen3-14b")
    playable_trace, _ = playable(load_trace(trace), longest_of(profile, GPUS))
    job = Job(playable_trace, profile, profile, GPUS, "libra", "static-best", seed, steps=12)
    job = replace(job, bound=1, staleness="cut", groups_per_step=16)
    drawn = world_of(job)
    told = drawn.scene.recipe.model_dump(mode="json")
    told["weight_sync"]["clear_cache"] = clear
    scene = replace(drawn.scene, recipe=Recipe.model_validate(told))
    world = World(scene, contender(job.policy, Future(), job.trace, seed), job.groups())
    steps = world.run().steps
    servers = world.servers
    engines = [*servers.engines.values(), *(engine for _, engine in servers.retired)]
    again = sum(engine.reprefilled_tokens for engine in engines)
    generated = sum(engine.generated_tokens for engine in engines)
    trained = sum(step.generated_tokens for step in steps[1:])
    return trained / (steps[-1].ended_at - steps[0].ended_at), again / generated


def simulate(traces: Sequence[str], seeds: int) -> Iterator[str]:
    """A line of each trace: means of both, and the gain of pairs with its interval."""
    for trace in traces:
        pairs = [
            [simulated(trace, seed, clear=clear) for clear in (True, False)]
            for seed in range(seeds)
        ]
        gains = [100 * (kept[0] / cleared[0] - 1) for cleared, kept in pairs]
        span = interval(gains)
        half = f" ± {span[1] - fmean(gains):.1f}" if span else ""
        again = (f"{fmean(pair[arm][1] for pair in pairs):.2f}" for arm in (0, 1))
        yield f"{trace}: {fmean(gains):+.1f} %{half} tokens/s; again {' -> '.join(again)}\n"


def main() -> None:
    """Do the runs that are not in the file, or print the table of those that are."""
    parser = ArgumentParser(prog="python -m tests.research.kept_cache")
    add = parser.add_argument
    add("--out", type=Path, default=Path("kept.jsonl"))
    add("--simulated", nargs="+", metavar="TRACE", default=[])
    add("--tasks", nargs="+", default=["quickstart", "long"])
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=40)
    add("--table", action="store_true")
    typed = parser.parse_args()
    if typed.simulated:
        sys.stdout.writelines(simulate(typed.simulated, typed.seeds))
        return
    lines = typed.out.read_text(encoding="utf-8").splitlines() if typed.out.is_file() else []
    runs = [json.loads(line) for line in lines]
    if typed.table:
        sys.stdout.write("\n".join(table(runs)) + "\n")
        return
    for run in wanted(typed):
        if any(all(done[name] == run[name] for name in run) for done in runs):
            continue
        recipe = recipe_of(run["task"], run["steps"], clear=run["clear"])
        result = played(recipe, run["seed"], told_of)
        with typed.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**run, **result}) + "\n")


if __name__ == "__main__":
    main()
