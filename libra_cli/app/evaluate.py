"""``libra eval``: finds the model, has the evaluations of a recipe played, writes what came out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from libra_cli import __version__
from libra_cli.config.errors import (
    HostError,
    InputError,
    RecipeError,
    StoppedByUser,
    WrongRun,
)
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import known_secrets, masker
from libra_cli.core.json_form import json_form
from libra_cli.core.records import EvaluationRecord, ExportRecord
from libra_cli.report.status.evaluations import EvaluationPart, evaluation_parts
from libra_cli.runtime.evaluation.standalone import StandaloneEvaluation
from libra_cli.runtime.hosts.owned_directory import OwnedDirectory
from libra_cli.runtime.interrupts import CLEARING, Interrupts
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.result_files import check_place, write_result
from libra_cli.runtime.store.reader import Reader, has_run
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.runtime.supervision.quotations import masked_errors
from libra_cli.runtime.trainer.checkpoints import FoundCheckpoint, scored_by
from libra_cli.runtime.trainer.model_export import MERGED
from libra_cli.runtime.trajectory_source import check_source


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What ``libra eval`` found, and where it is to be written."""

    model: str
    recipe: Path
    evaluations: list[EvaluationPart]
    path: Path

    def write(self) -> None:
        """Write it as JSON.

        Raises:
            LibraError: it cannot be written.
        """
        told = {
            "libra": __version__,
            "model": self.model,
            "recipe": str(self.recipe),
            "at": time.time(),
            "evaluations": json_form(self.evaluations),
        }
        write_result(self.path, json.dumps(told, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """The model to evaluate: its directory and, of one that a run has made, on which host and how
    it is made again."""

    path: Path
    node: str = ""
    again: str = ""


def evaluate(
    target: Path,
    recipe_path: Path,
    output: Path | None,
    *,
    step: int | None,
    told: Callable[[EvaluationRecord], None],
    note: Callable[[str], None],
) -> EvaluationResult:
    """Evaluate a model directory, or the model that a run has made; ``step``: of this one.

    Nothing is written yet, but ``output`` can be.

    Raises:
        RecipeError: the recipe has a problem, or no evaluation.
        WrongRun: there is no such model, or it is not there any more.
        InputError: the result cannot be written there.
        LibraError: a host or a server failed, or it was stopped.
    """
    recipe = load_recipe(recipe_path)
    if not recipe.evaluation:
        raise RecipeError(
            f"{recipe_path} has no evaluation", hint="add a section, as evaluation: {num_tasks: 64}"
        )
    model = model_of(target, step)
    path = output or Path(f"{model.path.name}.evaluation-{time.strftime('%Y%m%d-%H%M%S')}.json")
    check_place(path, hint=f"libra eval {target} {recipe_path} -o result.json")
    mask = masker(known_secrets(recipe))
    with masked_errors(mask):
        rows = asyncio.run(_played(recipe, model, told, lambda text: note(mask(text))))
    return EvaluationResult(str(model.path), recipe_path, evaluation_parts(rows), path)


def model_of(target: Path, step: int | None) -> EvaluatedModel:
    """The model in the directory that is named, or of a run the best that it has made.

    Raises:
        WrongRun: there is none, or it is an adapter, or the run's recipe cannot be read.
        InputError: a step is named, and the directory is no run's.
    """
    if not has_run(target):
        model = target.expanduser().absolute()
        if not model.is_dir():
            raise WrongRun(f"{target} is no directory", hint="libra export RUN_DIR makes a model")
        if step is not None:
            raise InputError(
                f"--step chooses among the models of a run, and {target} is one model",
                hint=f"libra eval {target} RECIPE; or libra eval RUN_DIR RECIPE --step {step}",
            )
        return EvaluatedModel(_whole(model))
    with Reader(target) as reader:
        made = [row for row in _scored(reader, target) if step in (None, row.step)]
    again = f"libra export {target}{'' if step is None else f' --step {step}'}"
    if not made:
        raise WrongRun(
            f"{target} has made no model{'' if step is None else f' of step {step}'}", hint=again
        )
    best = max(made, key=_worth)
    newest = max(made, key=lambda row: row.at)
    if newest.step != best.step:  # of the best one the checkpoint may be gone as well
        again += f"; or libra eval {target} RECIPE --step {newest.step}"
    return EvaluatedModel(_whole(Path(best.path)), best.node, again)


def _scored(reader: Reader, run_dir: Path) -> list[ExportRecord]:
    """Return the models that a run has made with the scores that are known of them now: one that
    was made with its checkpoint was made before its evaluation ended."""
    made, evaluations = reader.exports(), reader.evaluations()
    if not evaluations:
        return made
    try:
        names = recipe_of(run_dir).evaluation_names
    except WrongRun:  # its recipe is gone, or of a libra that read another one
        return made
    found = [FoundCheckpoint(row.path, row.step, row.score, (row.node,)) for row in made]
    known = scored_by(found, evaluations, names)
    return [replace(row, score=one.score) for row, one in zip(made, known, strict=True)]


def _worth(made: ExportRecord) -> tuple[float, int, bool, float]:
    """Rank a model by score and step, what an adapter was merged into above the adapter alone."""
    score = float("-inf") if made.score is None else made.score
    return score, made.step, made.path.endswith(MERGED), made.at


def _whole(model: Path) -> Path:
    """Return the directory; raises WrongRun if it is here and holds an adapter alone."""
    if (model / "adapter_config.json").exists() and not (model / "config.json").exists():
        raise WrongRun(
            f"{model} is an adapter, and servers are started with whole models",
            hint="libra export RUN_DIR --merge",
        )
    return model


def _with_model(recipe: Recipe, model: EvaluatedModel) -> Recipe:
    """Return a copy of the recipe with this model."""
    update = {"path": str(model.path), "build": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


async def _played(
    recipe: Recipe,
    model: EvaluatedModel,
    told: Callable[[EvaluationRecord], None],
    note: Callable[[str], None],
) -> list[EvaluationRecord]:
    check_source(recipe)
    interrupts = Interrupts(note)
    interrupts.end_task()
    with OwnedDirectory("eval") as work:
        evaluation = StandaloneEvaluation(
            _with_model(recipe, model),
            work,
            told=told,
            note=note,
            ending=lambda: interrupts.end_nothing(CLEARING),
        )
        try:
            return await evaluation.run()
        except HostError as error:
            if not evaluation.lacks_model(model.node):
                raise
            raise WrongRun(
                f"{model.node} has no {model.path} any more, which the run made: libra gc, or "
                "somebody, removed it",
                hint=model.again,
            ) from error
        except asyncio.CancelledError:
            raise StoppedByUser("stopped; nothing was written") from None
