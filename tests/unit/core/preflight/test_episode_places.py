"""How many episodes a host is said to hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from libra_cli.config.recipe import Recipe
from libra_cli.config.sandbox import SandboxLimitsSection
from libra_cli.core.preflight.episode_places import (
    EPISODE_MIB,
    EPISODES_A_CORE,
    MIB,
    HostsThatPlay,
    episodes_held,
    most_episodes,
)
from libra_cli.core.preflight.host_report import NodeFacts

HOSTS = Path(__file__).parents[3] / "fixtures/hosts"
HOST = NodeFacts.read(json.loads((HOSTS / "two-h100.json").read_text()))
LIMITS = {"memory_mb": 100 - EPISODE_MIB, "disk_mb": 100}
"""Of sandboxes that take 200 MiB with what keeps them."""


def recipe(*episodes: Any, sandbox: Any = None) -> Recipe:
    """Of environments that are played on a host that only plays, and on one that also trains."""
    workers = [{"nodes": ["plays", "trains"], "episodes": one} for one in episodes]
    sandbox = {"limits": LIMITS} if sandbox is None else sandbox
    return Recipe.model_validate(
        {
            "nodes": [{"host": "trains"}, {"host": "plays", "pool": "environments"}],
            "model": {"path": "/m"},
            "environment": [
                {"name": "shell", "label": str(n), "sandbox": sandbox, "workers": one}
                for n, one in enumerate(workers)
            ],
        }
    )


def told(mib: int, cpus: int = 64) -> NodeFacts:
    return replace(HOST, mem_free=mib * MIB, cpus=cpus)


def with_places(made: Recipe, facts: dict[str, NodeFacts]) -> Recipe:
    that_play = HostsThatPlay(made.all_environments, facts, {"trains"})
    return made.with_environments(that_play.counted)


def test_memory_is_divided_by_all_that_an_episode_may_fill() -> None:
    limits = SandboxLimitsSection.model_validate(LIMITS)
    assert episodes_held(limits, cores=64, memory=2_000 * MIB) == 10
    assert episodes_held(limits, cores=64, memory=1_999 * MIB) == 9
    assert episodes_held(limits, cores=64, memory=0) == 1
    assert episodes_held(limits, cores=2, memory=1e15) == 2 * EPISODES_A_CORE


def test_a_host_with_slots_keeps_half_of_its_memory_for_them() -> None:
    facts = {"trains": told(4_000), "plays": told(4_000)}
    (environment,) = with_places(recipe("auto"), facts).environment
    assert environment.workers is not None
    assert environment.workers.episodes == {"plays": 20, "trains": 10}
    assert environment.workers.most_episodes == 30


def test_environments_share_the_memory_of_their_host() -> None:
    facts = {"trains": told(4_000), "plays": told(4_000)}
    two = with_places(recipe("auto", "auto"), facts)
    assert [one.workers and one.workers.most_on("plays") for one in two.environment] == [10, 10]
    assert most_episodes(two.environment) == 30
    known = with_places(recipe("auto", 7), facts)
    assert [one.workers and one.workers.most_on("plays") for one in known.environment] == [20, 7]


def test_a_run_has_no_limit_where_one_environment_has_none() -> None:
    assert most_episodes(recipe(3).environment) == 6
    assert most_episodes(recipe(3, {"plays": 1, "trains": 2}).environment) == 9
    assert most_episodes(recipe(3, None).environment) is None
    assert most_episodes(recipe("auto").environment) is None  # until hosts have told
    assert most_episodes(with_places(recipe("auto"), {}).environment) == 2


@pytest.mark.parametrize(
    ("episodes", "sandbox", "words"),
    [
        ("auto", {"backend": "none"}, "give sandbox, or a number"),
        ({"plays": 3}, None, r"different hosts \(trains\)"),
        (0, None, "greater than"),
        ("many", None, "auto"),
    ],
)
def test_what_cannot_be_counted_is_refused(episodes: Any, sandbox: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        recipe(episodes, sandbox=sandbox)


def test_auto_needs_hosts_that_tell() -> None:
    workers = {"episodes": "auto"}
    told = {"name": "shell", "sandbox": {}, "workers": workers}
    with pytest.raises(ValidationError, match="name nodes, or give a number"):
        Recipe.model_validate({"nodes": [{"host": "a"}], "model": {}, "environment": told})
