"""``libra doctor``: all checks on all hosts of a recipe, and what can be mended without root."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from libra_cli.app.first_plan import first_plan
from libra_cli.core.preflight.findings import Finding
from libra_cli.runtime.doctor.examination import Examination
from libra_cli.runtime.recipes.loader import load_recipe


def doctor(recipe_path: Path, *, on_stage: Callable[[str], None]) -> list[Finding]:
    """Examine every host of a recipe. ``on_stage`` is told what is being done.

    Raises:
        RecipeError: the recipe itself is wrong.
    """
    recipe = load_recipe(recipe_path)
    plan, _ = first_plan(recipe)
    return asyncio.run(Examination(recipe, plan, str(recipe_path), on_stage=on_stage).run())
