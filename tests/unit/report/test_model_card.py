"""The card of an exported model, as far as the run's database knows it."""

from __future__ import annotations

from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.report.model_card import model_card
from libra_cli.runtime.store.reader import Reader
from tests import sample_run

RECIPE = Recipe.model_validate(
    {
        "run": {"name": "mine", "directory": "/home/somebody/runs"},
        "nodes": [{"host": "gpu-17.example.org", "user": "somebody"}],
        "model": {"path": "/models/Qwen3-1.7B"},
        "environment": {"name": "calculator", "secrets": {"KEY": "hidden"}},
    }
)


def test_a_card_tells_the_run_and_neither_hosts_nor_secrets(tmp_path: Path) -> None:
    sample_run.write(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        card, steps = model_card(reader, RECIPE, 20), reader.steps()
    body = card["body"]
    assert (card["name"], card["base"]) == ("Qwen3-1.7B-mine-step-20", "Qwen3-1.7B")
    first = sum(step.reward for step in steps[:10]) / 10
    last = sum(step.reward for step in steps[10:20]) / 10
    assert f"| reward, mean of the first 10 steps | {first:.4f} |" in body
    assert f"| reward, mean of the last 10 steps | {last:.4f} |" in body
    assert "| weight version | v000020-e" in body
    for private in ("gpu-17", "somebody", "hidden"):
        assert private not in body
