"""Hosts before a run: ``libra doctor``, what it can mend without root, and ``libra setup``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from libra_cli.app.first_plan import first_plan
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.preflight.findings import Finding, Fix
from libra_cli.runtime.doctor.environment import Packages, requirements_of
from libra_cli.runtime.doctor.examination import Examination
from libra_cli.runtime.doctor.setup import Setup, SetupProgress, SetupResult
from libra_cli.runtime.recipes.loader import load_recipe


def doctor(recipe_path: Path, *, on_stage: Callable[[str], None]) -> list[Finding]:
    """Examine every host of a recipe. ``on_stage`` is told what is being done.

    Raises:
        RecipeError: the recipe itself is wrong.
    """
    recipe = load_recipe(recipe_path)
    plan, _ = first_plan(recipe)
    return asyncio.run(Examination(recipe, plan, str(recipe_path), on_stage=on_stage).run())


def mend(recipe_path: Path, found: Sequence[Finding], progress: SetupProgress) -> list[str]:
    """Mend what needs no root; a sentence for everything that was tried.

    Raises:
        RecipeError: the recipe itself is wrong.
    """
    recipe = load_recipe(recipe_path)
    plan, _ = first_plan(recipe)
    told: list[str] = []
    environments, models = _hosts(found, "environment"), _hosts(found, "model")
    if environments or models:
        for result in prepare(recipe, environments, models, progress):
            told += [f"{result.host}: {line}" for line in (*result.done, result.error) if line]
    if remains := _hosts(found, "remains"):
        job = Examination(recipe, plan, str(recipe_path), on_stage=lambda stage: None)
        cleared = asyncio.run(job.clear_remains(remains))
        told += [f"{host}: {line}" for host, line in cleared.items()]
    return told


def setup(
    recipe_path: Path,
    progress: SetupProgress,
    *,
    wheels: Path | None,
    index: str | None,
) -> list[SetupResult]:
    """Prepare every host of a recipe.

    Raises:
        RecipeError: the recipe is wrong.
    """
    recipe = load_recipe(recipe_path)
    names = [node.name for node in recipe.nodes]
    return prepare(recipe, names, names, progress, wheels=wheels, index=index)


def prepare(
    recipe: Recipe,
    environments: Collection[str],
    models: Collection[str],
    progress: SetupProgress,
    *,
    wheels: Path | None = None,
    index: str | None = None,
) -> list[SetupResult]:
    """Make the environments of some hosts, and copy the model to some."""

    def packages_of(node: NodeSpec) -> Packages:
        return Packages(requirements_of(node), wheels, index)

    job = Setup(recipe, progress, environments=environments, models=models)
    return asyncio.run(job.run(packages_of))


def _hosts(found: Sequence[Finding], fix: Fix) -> list[str]:
    return [one.host for one in found if one.remedy is not None and one.remedy.fix == fix]
