"""The card of an exported model, as far as the run's database knows it."""

from __future__ import annotations

import json
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
ALICES = "/home/alice/work"
PRIVATE = {
    "run": {"monitors": {"mlflow": {"tracking_uri": "http://gpu-19:5000", "user": "alice"}}},
    "environment": {
        "name": "dataset",
        "tasks": f"{ALICES}/gsm8k.jsonl",
        "args": {
            "judge": {"url": "http://gpu-18:8000/v1", "api_key": "hidden", "model": "Qwen3-8B"},
            "rubric": f"{ALICES}/rubric.txt",
            "prompt": "/no_think Answer in <a></a>, and/or say so.",
        },
        "mcp": [{"url": "http://gpu-18/mcp", "headers": {"Authorization": "Bearer hidden"}}],
    },
    "agent": {
        "command": [
            "python",
            f"--path={ALICES}/agent.py",
            "--at=https://gpu-18:1/v1",
            f"--data=file://{ALICES}/x",
            f"P=/a/b:{ALICES}/c",
            f"cat '{ALICES}/d'",
        ],
    },
    "evaluation": {
        "environment": {"name": "calculator", "secrets": {"KEY": "hidden"}, "mcp": "http://gpu-18"},
    },
    "planner": {"profile": f"{ALICES}/h100.json"},
}


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


def test_a_recipe_on_a_card_names_no_hosts_secrets_or_directories(tmp_path: Path) -> None:
    sample_run.write(tmp_path / "run")
    recipe = Recipe.model_validate({**RECIPE.model_dump(exclude_defaults=True), **PRIVATE})
    with Reader(tmp_path / "run") as reader:
        body = model_card(reader, recipe, 20)["body"]
    for private in ("gpu-1", "alice", "hidden", "/models/", "5000"):
        assert private not in body
    shared = json.loads(body.partition("```json")[2].rpartition("```")[0])
    environment = shared["environment"]
    assert environment["tasks"] == [{"path": "gsm8k.jsonl"}]
    assert environment["args"] == {
        "judge": {"model": "Qwen3-8B"},
        "rubric": "rubric.txt",
        "prompt": "/no_think Answer in <a></a>, and/or say so.",
    }
    assert shared["agent"]["command"] == [
        "python",
        "--path=agent.py",
        "--at=https://HOST/v1",
        "--data=file://HOST",
        "P=b:c",
        "cat 'd'",
    ]
    assert shared["model"] == {"path": "Qwen3-1.7B"}
