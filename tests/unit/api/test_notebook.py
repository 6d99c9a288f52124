"""The notebook that reads a run does so, cell by cell, and writes a recipe that can be run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.tasks.mixture import Tasks
from tests.played import write_played
from tests.sample_run import STEPS

pytestmark = pytest.mark.vllm

NOTEBOOK = Path(__file__).parents[3] / "recipes/read-a-run.ipynb"


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("Agg")
    write_played(tmp_path / "runs/quickstart-1")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    axes = names["axes"]
    lengths = [len(line.get_xdata()) for line in axes.lines]  # type: ignore[attr-defined]
    assert lengths == [STEPS + 1] * 2
    assert "look<|im_end|>" in capsys.readouterr().out
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert len(Tasks(recipe.environment[0].tasks)) == 100
