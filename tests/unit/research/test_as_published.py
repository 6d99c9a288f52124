"""The profile as published is what its fit makes, near the published ratios, and never proposed."""

from __future__ import annotations

import pytest

from libra_cli.app.costs import shipped_for, shipped_of
from libra_cli.bench.paper.crossover import PUBLISHED, TOOL_S, crossover
from libra_cli.config.recipe import Recipe
from libra_cli.sim.profiles import load_profile
from tests.research.as_published import LIKE, NAME, error, fitted, numbers, profile_of


def test_the_shipped_file_is_what_the_fit_makes() -> None:
    constants = fitted()
    assert constants[2] == TOOL_S
    assert profile_of(*constants).to_json() == load_profile(NAME).to_json()


def test_no_constant_near_it_fits_better() -> None:
    slowness, kv_share, tool_s = constants = fitted()
    least = error(*constants)
    for factor in (0.96, 1.04):
        assert error(slowness * factor, kv_share, tool_s) > least
        assert error(slowness, kv_share * factor, tool_s) > least
        assert error(slowness, kv_share, tool_s * factor) > least


def test_its_ratios_are_within_16_percent_of_the_published_ones() -> None:
    found = crossover(load_profile(NAME))
    for ours, theirs in zip(numbers(found), numbers(PUBLISHED), strict=True):
        assert ours == pytest.approx(theirs, rel=0.16)
    assert found.training_growth == pytest.approx(PUBLISHED.training_growth, rel=0.01)


def test_the_shipped_prices_are_not() -> None:
    found = crossover(load_profile(LIKE))
    assert found.large_over_small < 0.5 * PUBLISHED.large_over_small
    assert found.training_growth > 5 * PUBLISHED.training_growth


def test_it_is_proposed_to_no_run_of_that_model_on_those_gpus() -> None:
    recipe = Recipe.model_validate(
        {"nodes": [{"host": "one", "gpus": 8}], "model": {"path": "/models/Qwen3-14B"}}
    )
    assert NAME not in shipped_of(recipe)
    found = shipped_for(recipe, frozenset({"NVIDIA A800-SXM4-80GB"}))
    assert found is not None
    assert found.name == LIKE
