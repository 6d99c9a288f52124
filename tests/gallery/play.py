"""Runs a recipe as a user does, and examines the model that it began with and the one it made."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from libra_cli.api import LoadedRun, load_run
from libra_cli.node.model.build import provide
from libra_cli.runtime.recipes.yaml_lines import read_yaml
from tests.gallery.entries import ENTRIES, HELD_OUT, RECIPES, Entry
from tests.gallery.facts import Curve, Examination, Facts, curve_of, examination, facts_of
from tests.gallery.fault import Killer, timeline_of
from tests.gallery.machine import machine
from tests.gallery.watched import Say, run_watched
from tests.made_page import EntryFailed

LIBRA = Path(sys.executable).with_name("libra")


@dataclass
class Stage:
    """The folder of an entry, in which its commands work, and what was typed in it."""

    entry: Entry
    root: Path
    say: Say
    commands: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        return self.root / self.entry.name

    @property
    def home(self) -> Path:
        """The home of all entries, so that models are built once and nothing else is touched."""
        return self.root / "home"

    def libra(
        self,
        *arguments: str,
        shown: Sequence[str] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> float:
        """Run a command and keep what it was; return its seconds.

        ``shown``: how a reader would type it, where paths of this machine stand in it;
        ``meanwhile`` is called every second.

        Raises:
            EntryFailed: it failed, or took too long.
        """
        typed = f"libra {' '.join(shown or arguments)}"
        self.commands.append(typed)
        log = self.place / f"{arguments[0]}.log"
        began = time.monotonic()
        try:
            status = run_watched(
                [LIBRA, *arguments],
                cwd=self.place,
                log=log,
                env={**os.environ, "HOME": str(self.home)},
                say=self.say,
                meanwhile=meanwhile,
            )
        except TimeoutError as error:
            raise EntryFailed(f"{typed}: {error}\nnext: tail {log}") from None
        if status:
            raise EntryFailed(f"{typed} ended with {status}\nnext: tail {log}")
        return time.monotonic() - began


def play(entry: Entry, root: Path, say: Say) -> Facts:
    """Run an entry from its beginning; return its facts.

    Raises:
        EntryFailed: something failed.
    """
    stage = Stage(entry, root, say)
    rmtree(stage.place, ignore_errors=True)
    stage.place.mkdir(parents=True)
    stage.home.mkdir(exist_ok=True)
    if entry.needs and not _home_path(stage, ENTRIES[entry.needs].exports_to).is_dir():
        raise EntryFailed(f"it begins with the model of {entry.needs}\nnext: run that before")
    models = stage.home / ".libra" / "models"
    there = set(models.glob("*"))
    at, day = machine(), time.strftime("%Y-%m-%d")
    recipe = f"recipes/{entry.recipe.name}"
    killer = Killer(stage.place, say)
    meanwhile = killer.look if entry.kills_a_server else lambda: None
    whole_s = stage.libra("run", str(entry.recipe), shown=["run", recipe], meanwhile=meanwhile)
    run = _finished(stage)
    if entry.kills_a_server:
        stage.commands.insert(1, "kill -9 PID    # of a vLLM server, half of the steps later")
    known: dict[str, Any] = {
        "name": entry.name,
        "recipe": recipe,
        "machine": at,
        "day": day,
        "whole_s": whole_s,
        "built_model": set(models.glob("*")) != there,
        "timeline": timeline_of(run, killer) if entry.kills_a_server else None,
    }
    _export(stage, run)
    known |= _examinations(stage, run)
    return facts_of(run, known | {"commands": stage.commands}, entry.curve)


def _finished(stage: Stage) -> LoadedRun:
    runs = [load_run(path.parent) for path in sorted(stage.place.glob("runs/*/libra.db"))]
    finished = [run for run in runs if run.state == "finished"]
    if not finished:
        raise EntryFailed(f"no run in {stage.place} has finished\nnext: libra status there")
    return finished[-1]


def play_again(entry: Entry, root: Path, say: Say, seed: int) -> Curve:
    """Run an entry that was played once more with another seed; return what is drawn of it.

    Raises:
        EntryFailed: it failed.
    """
    stage = Stage(entry, root, say)
    stage.libra("run", str(entry.recipe), "--seed", str(seed))
    return curve_of(_finished(stage), entry.curve)


def _export(stage: Stage, run: LoadedRun) -> None:
    """Copy the model to where another recipe looks for it, if one does."""
    if stage.entry.exports_to:
        target = _home_path(stage, stage.entry.exports_to)
        rmtree(target, ignore_errors=True)
        shown = ["export", "RUN_DIR", "--to", stage.entry.exports_to]
        stage.libra("export", str(run.directory), "--to", str(target), shown=shown)


def _home_path(stage: Stage, path: str) -> Path:
    return stage.home / path.removeprefix("~/")


def _examinations(stage: Stage, run: LoadedRun) -> dict[str, Examination | None]:
    """Examine the model that the run made, and that which it began with, if the run did not."""
    by = RECIPES / f"{stage.entry.examined_by or stage.entry.name}.yaml"
    text = by.read_text(encoding="utf-8")
    recipe, shown = by, f"recipes/{by.name}"
    if not read_yaml(text).value.get("evaluation"):
        # Beside the recipe nothing may be written, and what it names is found from where it is.
        recipe, shown = stage.place / "examination.yaml", "examination.yaml"
        recipe.write_text(f"{text}\nevaluation: {json.dumps(HELD_OUT)}\n", encoding="utf-8")
        for path in (part for part in RECIPES.iterdir() if part.is_dir()):
            (stage.place / path.name).symlink_to(path)
        values = ", ".join(f"{name}: {value}" for name, value in HELD_OUT.items())
        stage.commands.append(
            f"(cat recipes/{by.name}; echo 'evaluation: {{{values}}}') > recipes/{shown}"
        )
        shown = f"recipes/{shown}"
    before = None
    if not any(one.step == 0 for one in run.evaluations):
        model = _first_model(stage, run)
        before = _examined(stage, model, recipe, ["MODEL", shown])
    exported = _examined(stage, run.directory, recipe, ["RUN_DIR", shown])
    return {"before": before, "exported": exported}


def _first_model(stage: Stage, run: LoadedRun) -> Path:
    """Return the directory of the model that a run began with."""
    model = {**run.recipe["model"], "cache": str(stage.home / ".libra" / "models")}
    if model["path"] is not None:
        model["path"] = str(_home_path(stage, model["path"]))
    return Path(provide(model)["model_dir"])


def _examined(stage: Stage, model: Path, recipe: Path, shown: Sequence[str]) -> Examination:
    result = stage.place / f"{shown[0].lower()}.json"
    stage.libra("eval", str(model), str(recipe), "--output", str(result), shown=["eval", *shown])
    (part, *_) = json.loads(result.read_text(encoding="utf-8"))["evaluations"]
    if "pass@1/low" not in part["metrics"]:
        raise EntryFailed(f"no trajectory of {result} was scored\nnext: less {result}")
    return examination(
        part["metrics"], step=part["step"], tasks=part["tasks"], samples=part["samples"]
    )
