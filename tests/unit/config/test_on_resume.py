"""Each key of a recipe says whether it may be another when a run goes on."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from libra_cli.app.explain import recipe_keys, recipe_schema
from libra_cli.config.on_resume import UNSAID, changes, mark_of, sections_of
from libra_cli.config.recipe import Recipe
from tests.world import recipe

KEYS = [(section, key) for section in sections_of(Recipe).values() for key in section.model_fields]


def test_every_key_of_a_recipe_is_classified() -> None:
    unsaid = [f"{one.__name__}.{key}" for one, key in KEYS if mark_of(one, key) is UNSAID]
    assert not unsaid, f"say whether they may change when a run goes on: {unsaid}"
    assert len(KEYS) > 100


def test_what_must_stay_says_why() -> None:
    reasons = [mark.why_not for one, key in KEYS if (mark := mark_of(one, key)).why_not]
    assert all(len(reason.split()) >= 4 for reason in reasons)
    assert len(reasons) > 20


def test_the_schema_and_libra_explain_tell_of_every_key() -> None:
    schema = recipe_schema()
    for section, key in KEYS:
        node = schema if section is Recipe else schema["$defs"][section.__name__]
        words = node["properties"][key]["x-on-resume"]
        assert re.match("may change$|(may change, but [a-z]+ )?must stay: ", words)
    told = recipe_keys()
    assert told["recipe:run.steps"].on_resume == "may change"
    assert told["recipe:run.seed"].on_resume.startswith("must stay: it draws the tasks")


def found(before: Recipe, now: Recipe) -> list[tuple[str, bool]]:
    return [(one.key, bool(one.why_not)) for one in changes(before, now)]


@pytest.mark.parametrize(
    ("now", "keys"),
    [
        ({}, []),
        ({"run": {"steps": 9}}, [("run.steps", False)]),
        ({"run": {"seed": 1, "steps": 9}}, [("run.seed", True), ("run.steps", False)]),
        ({"training": {"lora": {"rank": 4}}}, [("training.lora", True)]),
        ({"nodes": [{"host": "a"}, {"host": "b"}]}, [("nodes", False)]),
        ({"environment": {"name": "word-problems"}}, [("environment[0].name", True)]),
        ({"environment": {"retries": 9}}, [("environment[0].retries", False)]),
        ({"environment": {"tasks": ["/rows.jsonl"]}}, [("environment[0].tasks", True)]),
        ({"environment": {"secrets": {"A": "b"}}}, [("environment[0].secrets", False)]),
    ],
)
def test_changes_are_found_key_by_key(now: dict[str, Any], keys: list[tuple[str, bool]]) -> None:
    assert found(recipe(), recipe(**now)) == keys


def test_what_is_evaluated_may_be_another_down_to_its_judge_and_its_tasks() -> None:
    def evaluating(budget: int, split: str) -> Recipe:
        tasks = [{"path": "/rows", "split": split}]
        judged = {"name": "dataset", "args": {"judge": {"budget": budget}}, "tasks": tasks}
        return recipe(evaluation={"environment": judged})

    told = found(evaluating(1, "test"), evaluating(2, "dev"))
    assert told
    assert not any(must_stay for _, must_stay in told)


def test_another_number_of_environments_must_not_be() -> None:
    two = recipe(environment=[{"name": "calculator"}, {"name": "pointer-chase"}])
    assert found(recipe(), two) == [("environment", True)]


def test_an_adapter_s_own_keys_must_stay() -> None:
    one, other = (recipe(training={"lora": {"rank": rank}}) for rank in (4, 8))
    assert found(one, other) == [("training.lora.rank", True)]


def test_an_optimizer_that_keeps_less_than_the_others_must_stay() -> None:
    def under(optimizer: str) -> Recipe:
        return recipe(training={"optimizer": optimizer, "sharding": "ddp"})

    for before, now in itertools.permutations(("adamw", "adamw_offload", "muon"), 2):
        told = found(under(before), under(now))
        assert told == [("training.optimizer", before == "muon")]
    words = recipe_keys()["recipe:training.optimizer"].on_resume
    assert words.startswith("may change, but muon must stay: the checkpoint lacks")


def test_a_secret_is_not_told() -> None:
    one, other = (recipe(environment={"secrets": {"A": word}}) for word in ("hidden1", "hidden2"))
    assert "hidden" not in "".join(map(str, changes(one, other)))


def test_a_run_goes_on_with_its_own_demonstrations():
    base = {
        "nodes": [{"host": "local"}],
        "model": {"build": {}},
        "training": {"loss": "sft"},
    }
    one = Recipe.model_validate({**base, "demonstrations": "a.jsonl"})
    moved = Recipe.model_validate({**base, "demonstrations": "b.jsonl"})
    two = Recipe.model_validate({**base, "demonstrations": ["a.jsonl", "b.jsonl"]})
    assert [change.why_not for change in changes(one, moved)] == [""]
    assert [change.key for change in changes(one, two) if change.why_not] == ["demonstrations"]
