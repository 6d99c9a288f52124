"""Every key has a meaning, and the JSON Schema accepts what libra does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from libra_cli.app import explain
from libra_cli.app.pages import page_of, pages
from libra_cli.cli.main import app
from libra_cli.config.errors import LibraError

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ACCEPTS = Draft202012Validator(explain.recipe_schema())
SHORT: dict[str, Any] = {
    "nodes": [{"host": "gpu-[01-06]", "gpus": 8, "slots": 2, "pool": ["rollout", "train"]}],
    "model": {"path": "/m"},
}


class Yaml12(yaml.SafeLoader):
    """As editors read numbers: ``1e-6`` is one."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def told(key: str) -> list[explain.KeyMeaning]:
    return explain.explain(key, pages())


def complaints(recipe: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in ACCEPTS.iter_errors(recipe)]


# -- keys ------------------------------------------------------------------------------------------


def test_every_key_of_a_recipe_has_a_meaning():
    keys = explain.recipe_keys()
    assert len(keys) > 100
    assert [key for key, one in keys.items() if not one.meaning] == []


def properties(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property that a JSON Schema has anywhere."""
    if isinstance(node, list):
        for one in node:
            yield from properties(one, path)
    if not isinstance(node, dict):
        return
    for name, one in node.get("properties", {}).items():
        yield f"{path}.{name}", one
    for name, one in node.items():
        yield from properties(one, f"{path}.{name}")


def test_every_property_of_the_schema_has_a_description_of_its_own():
    found = dict(properties(explain.recipe_schema()))
    assert len(found) > 150
    assert [path for path, one in found.items() if not one.get("description", "").strip()] == []


def test_every_key_of_status_is_named_in_a_row_of_its_page():
    page = page_of("status")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    keys = explain.status_keys(page)
    assert len(keys) > 200
    assert [one.key for one in keys.values() if not any(one.meaning in row for row in rows)] == []
    silent = []
    for one in keys.values():
        name = one.key.rpartition(".")[2]
        row = next(row for row in rows if one.meaning in row)
        if one.type != "mapping" and not re.search(rf"[`.]{name}(\[\])?`", row):
            silent.append(one.key)
    assert silent == []


def test_the_example_of_status_has_the_keys_that_there_are():
    (example,) = re.findall(r"^```json\n(.*?)^```$", page_of("status"), re.MULTILINE | re.DOTALL)
    keys = {one.key: one.type for one in explain.status_keys(page_of("status")).values()}
    paths = set(paths_in(json.loads(example)))
    named = {key for key, kind in keys.items() if kind.startswith("dict")}
    inside = {path for path in paths if any(path.startswith(f"{key}.") for key in named)}
    assert paths - inside - keys.keys() == set()
    assert {key for key in keys if "." not in key} - paths == set()


def paths_in(value, path=""):
    """Every key of an object as the path to it; of a list, those of its items."""
    if isinstance(value, list):
        for item in value:
            yield from paths_in(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            here = f"{path}.{key}".strip(".")
            yield here
            yield from paths_in(item, here)


def test_a_key_has_its_type_its_default_and_the_pages_that_speak_of_it():
    (one,) = told("training.max_staleness")
    assert (one.type, one.default) == ("integer, at least 0", "1")
    assert "on-policy" in one.meaning
    assert any(topic == "staleness" for topic, _ in one.pages)


@pytest.mark.parametrize("key", ["nodes.gpus", "nodes[].gpus", "nodes[0].gpus"])
def test_an_item_of_a_list_may_be_written_in_any_way(key):
    assert [one.key for one in told(key)] == ["nodes.gpus"]


def test_a_last_part_finds_keys_of_the_recipe_and_of_status():
    assert [(one.key, one.of) for one in told("staleness")] == [
        ("training.staleness", "recipe"),
        ("staleness", "status --json"),
    ]


def test_a_section_lists_its_keys():
    (one,) = told("weight_sync")
    assert [name for name, _ in one.keys] == [
        "directory",
        "keep_versions",
        "tolerance",
        "timeout_s",
        "clear_cache",
        "trusted_interface",
    ]
    assert all(meaning for _, meaning in one.keys)


def test_the_newest_plan_has_the_words_of_all_plans():
    assert told("plan.cost_s")[0].meaning == told("plans.cost_s")[0].meaning


def test_a_key_of_status_has_its_own_words_and_not_those_of_the_whole_row():
    assert told("slots.running")[0].meaning == "`running`: our requests inside it"
    assert told("plan.reasons")[0].meaning == "`reasons` (in sentences)"
    assert told("trajectories.finished")[0].meaning.startswith("attempts that came to an end")
    (one,) = told("predicted_after_s")
    assert (one.key, one.meaning) == (
        "plans.predicted_after_s",
        "`predicted_before_s`, `predicted_after_s` (seconds a step)",
    )


def test_a_value_finds_the_keys_that_may_be_it():
    assert [one.key for one in told("token_mask")] == ["training.sampler_correction"]


def test_an_unknown_key_names_those_that_look_like_it():
    with pytest.raises(LibraError) as caught:
        told("training.max_stalenes")
    assert "training.max_staleness" in caught.value.hint
    with pytest.raises(LibraError) as caught:
        told("zzzzzz")
    assert caught.value.hint == "libra explain lists the sections of a recipe"


def test_types_are_printed_with_what_they_hold():
    shown = CliRunner().invoke(app, ["explain", "staleness.histogram"])
    assert "staleness.histogram (status --json): dict[str, int]" in shown.output


def test_the_command_prints_a_key_and_the_schema():
    shown = CliRunner().invoke(app, ["explain", "rollout.group_size"])
    assert shown.output.startswith("rollout.group_size (recipe): integer, at least 1, 8 if left")
    assert '"$schema"' in CliRunner().invoke(app, ["explain", "--schema"]).output


# -- the schema ------------------------------------------------------------------------------------


def test_the_schema_is_one():
    Draft202012Validator.check_schema(explain.recipe_schema())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_schema_accepts_every_shipped_recipe(path):
    assert complaints(yaml.load(path.read_text(), Yaml12)) == []


@pytest.mark.parametrize("topic", sorted(pages()))
def test_the_schema_accepts_every_recipe_of_a_page(topic):
    for text in re.findall(r"^```yaml\n(.*?)^```", page_of(topic), re.M | re.S):
        assert complaints({**SHORT, **yaml.load(text, Yaml12)}) == [], text


@pytest.mark.parametrize(
    "part",
    [
        {"training": {"staleness": "cut"}},
        {"training": {"staleness": {"rule": "cut", "least": 0.4}}},
        {"training": {"algorithm": "grpo"}},
        {"training": {"export": {"at_end": "best"}}},
        {"training": {"lora": {"target_modules": "q_proj"}}},
        {"environment": {"name": "x", "tasks": "a.jsonl", "workers": 4, "mcp": "http://h/mcp"}},
        {"environment": [{"name": "x"}, {"name": "y", "weight": 2}]},
        {"environment": {"tasks": ["a", {"path": "b", "limit": 3}], "workers": {"nodes": "n"}}},
        {"run": {"monitors": "wandb"}},
        {"run": {"monitors": ["tensorboard", {"wandb": {"project": "p"}}]}},
        {"run": {"monitors": {"wandb": None}}},
        {"agent": {"command": "play"}},
        {"agent": {"command": ["play", "--fast"], "nodes": "gpu-01"}},
        {"nodes": [{"host": "local", "slots": 2, "pool": "auto"}]},
    ],
    ids=str,
)
def test_the_schema_accepts_short_forms(part):
    assert complaints({**SHORT, **part}) == []


@pytest.mark.parametrize(
    "part",
    [
        {"training": {"staleness": "never"}},
        {"training": {"max_stalenes": 1}},
        {"environment": {"workers": 0}},
        {"environment": []},
        {"environment": {"tasks": [{"split": "train"}]}},
        {"run": {"monitors": 3}},
        {"nodes": []},
        {"nodes": [{"host": "a b"}]},
    ],
    ids=str,
)
def test_the_schema_refuses_what_libra_refuses(part):
    assert complaints({**SHORT, **part}) != []
