"""A run tells nobody the secrets of its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from libra_cli.app import run as module
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.recipe import Recipe
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.run_records import Listeners

ROOT = Path(__file__).parents[3]
SECRET = "correct-horse"


@pytest.fixture
def recipe() -> Recipe:
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml")
    environment = recipe.environment[0].model_copy(update={"secrets": {"A": SecretStr(SECRET)}})
    return recipe.model_copy(update={"environment": (environment,)})


def test_notes_and_errors_of_a_run_are_masked(recipe, tmp_path, monkeypatch):
    def run(recipe: Recipe, path: Path, run_dir: Path, told: Listeners, **named: Any) -> None:
        told.note(f"login as {SECRET}")
        raise EnvironmentBroken(f"no login as {SECRET}", hint=f"try {SECRET}")

    notes: list[str] = []
    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(EnvironmentBroken) as caught:
        module.run(
            recipe, tmp_path, tmp_path, resume=False, watch=print, note=notes.append, certify=print
        )
    assert notes == ["login as [masked]"]
    assert (str(caught.value), caught.value.hint) == ("no login as [masked]", "try [masked]")


def test_a_run_that_has_ended_is_certified_before_its_report(recipe, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(module, "_run", lambda *given, **named: told.append("ran"))
    monkeypatch.setattr(module, "write_report", lambda *given, **named: told.append("reported"))
    module.run(
        recipe,
        tmp_path,
        tmp_path,
        resume=False,
        watch=print,
        note=print,
        certify=lambda run_dir: told.append(f"certified {run_dir.name}"),
    )
    assert told == ["ran", f"certified {tmp_path.name}", "reported"]
