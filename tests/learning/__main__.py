"""The command line: which runs there are, and the table of those that are done."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from libra_cli.config.recipe import Recipe
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.recipes.yaml_lines import read_yaml
from tests.learning.run import learned
from tests.learning.table import differences, table

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def arguments_of(parser: ArgumentParser) -> Namespace:
    """What was typed."""
    add = parser.add_argument
    add("--recipe", type=Path, default=RECIPE)
    add("--losses", nargs="+", default=["dapo"])
    add("--staleness", nargs="+", type=int, default=[1])
    add("--seeds", type=int, default=3, help="how many, from 0 on")
    add("--first-seed", type=int, default=0)
    add("--steps", type=int, default=40)
    add("--trajectories", type=int, default=0, help="end after the step that has played so many")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the recipe, as training.learning_rate=1e-4; the value is YAML",
    )
    add("--teacher", type=Path, help="of --losses distill: the directory of the teacher's model")
    add("--label", default="", help="what the table calls these settings; empty: the settings")
    add("--out", type=Path, default=Path("learning.jsonl"))
    add("--table", nargs="+", type=Path, help="print the table of these files, and nothing else")
    add(
        "--baseline",
        metavar="KEY=VALUE",
        help="the table's differences, paired by seed, from the runs that have another loss, "
        "staleness or label, and nothing else, as staleness=0 or label=",
    )
    add("--told", action="store_true", help="print every step")
    return parser.parse_args()


def wanted(typed: Namespace) -> Iterator[dict[str, Any]]:
    """The runs, as what tells one from another."""
    settings = [
        [key, read_yaml(value).value] for key, _, value in (one.partition("=") for one in typed.set)
    ]
    for seed in range(typed.first_seed, typed.first_seed + typed.seeds):
        for staleness in typed.staleness:
            for loss in typed.losses:
                yield {
                    "recipe": typed.recipe.name,
                    "loss": loss,
                    "staleness": staleness,
                    "steps": typed.steps,
                    "trajectories": typed.trajectories,
                    "seed": seed,
                    "settings": settings,
                    "label": typed.label,
                }


def recipe_of(typed: Namespace, run: dict[str, Any]) -> Recipe:
    """The recipe of a run; nothing of the ledger's staleness rule holds it back."""
    data = read_yaml(typed.recipe.read_text(encoding="utf-8")).value
    given = [
        ("run.steps", run["steps"]),
        ("run.seed", run["seed"]),
        ("training.loss", run["loss"]),
        ("training.max_staleness", max(1, run["staleness"])),
        ("training.staleness", "soft"),
        *run["settings"],
    ]
    if run["loss"] == "distill":  # no server: the teacher is in this process
        given.append(("teacher", {"url": "http://127.0.0.1"}))
    for key, value in given:
        *path, last = key.split(".")
        place = data
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / typed.recipe.name
        path.write_text(json.dumps(data), encoding="utf-8")
        return load_recipe(path)


def main() -> None:
    """Do the runs that are not in the file."""
    typed = arguments_of(ArgumentParser(prog="python -m tests.learning", description=__doc__))
    if typed.table:
        runs = [run for path in typed.table for run in _lines(path)]
        sys.stdout.write(differences(runs, typed.baseline) if typed.baseline else table(runs))
        return
    torch.set_num_threads(1)
    for run in wanted(typed):
        if any(all(done[name] == run[name] for name in run) for done in _lines(typed.out)):
            continue
        began = time.monotonic()
        teacher = typed.teacher if run["loss"] == "distill" else None
        result = learned(
            recipe_of(typed, run),
            run["staleness"],
            _teller(typed),
            trajectories=run["trajectories"],
            teacher=teacher,
        )
        line = {**run, **result, "wall_s": round(time.monotonic() - began, 1)}
        with typed.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        told = {name: line[name] for name in ("loss", "staleness", "seed", "label")}
        sys.stdout.write(f"{told} final {line['final']:.3f} area {line['area']:.3f}\n")
        sys.stdout.flush()


def _teller(typed: Namespace) -> Callable[[dict[str, Any]], None]:
    def told(row: dict[str, Any]) -> None:
        if typed.told:
            names = ("step", "reward", "trained_reward", "staleness", "entropy", "grad_norm")
            shown = {name: round(row[name], 3) for name in (*names, "play_s", "train_s")}
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()

    return told


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
