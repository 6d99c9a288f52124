"""A recipe file of any content is a recipe or a RecipeError."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import LibraError, RecipeError
from libra_cli.runtime.recipes.loader import load_recipe
from tests.unit.fuzz import nonsense

SHIPPED = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
WORDS = st.one_of(
    st.sampled_from([line for path in SHIPPED for line in path.read_text().splitlines()]),
    st.sampled_from(
        ["&a", "*a", "<<: *a", "!!python/object:os.system", "? ", "- ", "[", "{", "---"]
    ),
    st.text(max_size=10),
    st.builds(
        "{}: {}".format, st.sampled_from(["nodes", "model", "run", "environment"]), st.text()
    ),
)
files = st.one_of(
    st.binary(max_size=200),
    nonsense.broken(st.sampled_from([path.read_bytes() for path in SHIPPED])),
    st.lists(WORDS, max_size=12).map(lambda lines: "\n".join(lines).encode("utf-8", "replace")),
    nonsense.changed({"run": {"steps": 3}, "nodes": [{"host": "x"}], "model": {"path": "x"}}).map(
        nonsense.as_json
    ),
)


@given(data=files)
def test_a_recipe_is_loaded_or_its_problems_are_told(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"
    path.write_bytes(data)
    with nonsense.thrown_at("recipes"):
        load_recipe(path, {})


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"b{n}: &b{n} [*a,*a,*a]\n" for n in range(20)),
        "[" * 20_000,
        "- " * 20_000,
        "{a: " * 20_000,
        "run: {name: " + "x" * 10**5 + "}",
        'run: {name: "\\ud83d"}',
        "nodes: [{host: 'h[1-999999999]'}]",
        "nodes: [{host: 'h[1-9][1-9][1-9][1-9][1-9][1-9][1-9]'}]",
    ],
    ids=lambda text: text[:24],
)
def test_a_bomb_is_refused_in_seconds(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(RecipeError):
        load_recipe(path, {})
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    "text",
    ["nodes: ['(', {}]", "nodes: [3, {host: 3}]", "environment: [3, {tasks: 3}]", "agent: [3]"],
)
def test_wrong_values_beside_wrong_values_are_all_told(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError):
        load_recipe(path, {})


def test_a_recipe_that_is_no_file_is_told(tmp_path):
    with pytest.raises(LibraError):
        load_recipe(tmp_path, {})
