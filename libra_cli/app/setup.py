"""``libra setup``: Python environments and the model on all hosts of a recipe."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.runtime.doctor.environment import Packages, requirements_of
from libra_cli.runtime.doctor.setup import Setup, SetupProgress, SetupResult
from libra_cli.runtime.recipes.loader import load_recipe


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
        LibraError: there is nothing to prepare them with.
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
    """Make the environments of some hosts, and copy the model to some. Raises as ``setup``."""

    def packages_of(node: NodeSpec) -> Packages:
        return Packages(requirements_of(node), wheels, index)

    job = Setup(recipe, progress, environments=environments, models=models)
    return asyncio.run(job.run(packages_of))
