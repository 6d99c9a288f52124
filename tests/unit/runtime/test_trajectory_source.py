"""What a recipe names is found before any host is asked."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from libra_cli.config.errors import PluginError
from libra_cli.envs.pointer_chase import PointerChase
from libra_cli.runtime.trajectory_source import check_source
from tests.world import recipe


class Duel(PointerChase):
    """Nobody plays it here: it is only made."""

    roles = ("first", "second")


@pytest.fixture
def duel(monkeypatch: pytest.MonkeyPatch) -> str:
    module: Any = ModuleType("games_of_two")
    module.Duel = Duel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:Duel"


def test_an_advantage_with_a_critic_is_refused_for_an_environment_with_roles(duel: str) -> None:
    made = recipe(environment={"name": duel}, training={"advantage": "gae"})
    with pytest.raises(PluginError, match="gae estimates no advantages by role"):
        check_source(made)


def test_an_environment_with_roles_may_be_evaluated_beside_what_a_critic_learns(duel: str) -> None:
    evaluation = [{"name": "games", "environment": {"name": duel}}]
    check_source(recipe(training={"advantage": "gae"}, evaluation=evaluation))
    check_source(recipe(environment={"name": duel}))
