"""Experiments run under the conditions that a recipe has by default, and say which they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libra_cli.bench.conditions import Conditions
from libra_cli.bench.config import RULES, BenchError, ExperimentConfig
from libra_cli.bench.jobs import first_layout_of, world_of
from libra_cli.config.training import TrainingSpec
from libra_cli.core.rollout.staleness import default_rule, rule_of


def config(**changes: Any) -> ExperimentConfig:
    """Of a small experiment."""
    asked: dict[str, Any] = {
        "traces": ("mint",),
        "profile": "h100-qwen3-8b",
        "gpus": 16,
        "seeds": 1,
        "policies": "libra",
        "planners": "libra",
        "policy": "libra",
        "drift": "none",
    }
    return ExperimentConfig.parse(Conditions(**{**asked, **changes}))


def test_what_is_not_said_is_as_in_a_recipe() -> None:
    found, recipe = config(), TrainingSpec()
    job = found.job(found.traces[0], steps=2)
    played = world_of(job).scene.recipe.training
    assert played.max_staleness == recipe.max_staleness == found.bound
    assert played.staleness == recipe.staleness
    assert played.stream is recipe.stream
    assert f"max_staleness {recipe.max_staleness}" in found.conditions
    assert f"rule {default_rule(found.bound)} (the default)" in found.conditions
    assert "200 Gb/s" in found.conditions


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_asked_for_is_played_and_told(rule: str) -> None:
    found = config(rule=rule, bound=2, max_len=4_096, network=25.0, stream=True)
    job = found.job(found.traces[0], steps=2)
    recipe = world_of(job).scene.recipe
    spec = {"max_staleness": 2, "staleness": RULES[rule]}
    assert rule_of(recipe.training) == rule_of(TrainingSpec.model_validate(spec))
    assert recipe.training.stream
    assert recipe.model.max_len == job.max_len == 4_096
    assert job.profile.training.link_bandwidth == pytest.approx(25e9 / 8)
    for words in (f"max_staleness 2, rule {rule}, streamed", "25 Gb/s", "4,096 tokens"):
        assert words in found.conditions


def test_a_rule_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(BenchError, match="keep") as error:
        config(rule="keep")
    assert "hold" in error.value.hint


def test_shapes_that_are_asked_for_are_those_of_libras_plans_and_of_no_rule() -> None:
    found = config(shapes="mixed", gpus=32)
    assert "mixed servers" in found.conditions
    assert "servers" not in config().conditions
    job = found.job(found.traces[0], steps=2)
    shapes = {
        name: len(first_layout_of(replace(job, planner=name), job.workload).servers)
        for name in ("libra", "static-best", "greedy", "uniform")
    }
    assert shapes == {"libra": 2, "static-best": 2, "greedy": 1, "uniform": 1}
    with pytest.raises(BenchError, match="--shapes 'mixd'") as error:
        config(shapes="mixd")
    assert "mixed" in str(error.value)
