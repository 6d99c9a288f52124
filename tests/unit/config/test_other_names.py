"""Keys that other trainers have: a recipe with one is told libra's."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.app.explain import recipe_keys
from libra_cli.config.errors import RecipeError
from libra_cli.config.other_names.names import OTHER_NAMES
from libra_cli.config.other_names.rule import Table
from libra_cli.runtime.recipes.loader import load_recipe
from tests import migration_page

TABLES = [table for tables in migration_page.TABLES.values() for table in tables]


def test_every_name_stands_for_a_key_and_is_none() -> None:
    keys = {name.partition(":")[2] for name in recipe_keys()}
    assert set(OTHER_NAMES.values()) <= keys
    assert not set(OTHER_NAMES) & keys


def test_a_key_of_another_trainer_is_told_libras(tmp_path: Path) -> None:
    text = "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\ntraining: {lr: 1e-5}\n"
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"training\.lr: unknown key; libra's is training\.learn"):
        load_recipe(tmp_path / "r.yaml")


def test_the_page_shows_the_tables_as_they_are() -> None:
    page = migration_page.PAGE.read_text(encoding="utf-8")
    missing = [
        line
        for name in migration_page.TABLES
        for line in migration_page.tables(name).splitlines()
        if line not in page.splitlines()
    ]
    assert missing == [], "python -m tests.migration_page writes them"


@pytest.mark.parametrize("table", TABLES)
def test_every_rule_makes_keys_of_recipes(table: Table) -> None:
    known = {name.partition(":")[2] for name in recipe_keys()}
    for rule in table.rules:
        assert set(rule.ours) <= known, rule.theirs
        assert bool(rule.ours) == (rule.why is None), rule.theirs


@pytest.mark.parametrize("table", TABLES)
def test_no_key_has_two_rules_that_make_the_same(table: Table) -> None:
    seen: dict[str, tuple[str, ...]] = {}
    for rule in table.rules:
        for key in rule.theirs:
            other = seen.setdefault(key, rule.ours)
            assert other is rule.ours or not set(other) & set(rule.ours), key
