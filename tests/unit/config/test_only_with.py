"""A key that means nothing beside another says so itself: to the rule, the schema and explain."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from libra_cli.app.explain import recipe_keys, recipe_schema
from libra_cli.config.on_resume import sections_of
from libra_cli.config.only_with import Condition, condition_of
from libra_cli.config.problems import Problem, RuleError
from libra_cli.config.recipe import Recipe

MARKS = [
    (section, key, condition)
    for section in sections_of(Recipe).values()
    for key in section.model_fields
    if (condition := condition_of(section, key))
]
RECIPE = {"nodes": [{"host": "a", "gpus": 1}], "model": {"path": "/models/m"}}


@pytest.mark.parametrize(("section", "key", "condition"), MARKS, ids=str)
def test_every_condition_is_about_a_key_that_there_is(section, key, condition: Condition):
    if "." not in condition.key:
        assert condition.key in set(section.model_fields) - {key}
    else:
        assert f"recipe:{condition.key}" in recipe_keys()


def problems(**sections) -> tuple[Problem, ...]:
    try:
        Recipe.model_validate({**RECIPE, **sections})
    except ValidationError as error:
        (found,) = error.errors()
        cause = found["ctx"]["error"]
        assert isinstance(cause, RuleError)
        return cause.problems
    return ()


@pytest.mark.parametrize(
    ("staleness", "keys"),
    [
        ({"rule": "cut", "least": 0.4}, []),
        ({"rule": "late", "least": 0.4}, ["training.staleness.least"]),
        ({"over": "mask"}, ["training.staleness.over"]),
    ],
)
def test_a_key_is_refused_unless_the_other_has_its_value(staleness, keys):
    found = problems(training={"staleness": staleness})
    assert [problem.keys[0] for problem in found] == keys
    assert all(problem.keys[1] == "training.staleness.rule" for problem in found)


def test_a_key_is_refused_where_the_other_has_a_value_that_leaves_it_no_meaning():
    (found,) = problems(nodes=[{"host": "local", "gpus": 1, "port": 22}])
    assert found == Problem(
        ("nodes[0].port", "nodes[0].host"),
        "is 22, but nodes[0].host is 'local': this machine is reached over pipes",
    )
    assert problems(nodes=[{"host": "a", "gpus": 1, "port": 22}]) == ()


def test_a_penalty_and_its_buffer_need_one_another():
    assert problems(rollout={"overlong": {"penalty": 1.0, "buffer": 8}}) == ()
    for given in ({"penalty": 1.0}, {"buffer": 8}):
        (found,) = problems(rollout={"overlong": given})
        assert found.keys[0] == f"rollout.overlong.{next(iter(given))}"
        assert "{penalty: 1.0, buffer: 256}" in found.reason


def test_the_schema_and_explain_say_what_a_key_goes_with():
    least = recipe_schema()["$defs"]["StalenessSpec"]["properties"]["least"]
    assert least["x-only-with"] == "only with rule: cut"
    assert recipe_keys()["recipe:training.staleness.least"].only_with == "only with rule: cut"
    assert recipe_keys()["recipe:nodes.port"].only_with == "not with host: local"
    assert recipe_keys()["recipe:run.seed"].only_with == ""
