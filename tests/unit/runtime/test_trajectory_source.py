"""What a recipe names is found before any host is asked."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from libra_cli.config.errors import PluginError
from libra_cli.envs.pointer_chase import PointerChase
from libra_cli.runtime import trajectory_source
from libra_cli.runtime.episodes.workers import no_nodes
from libra_cli.runtime.trajectory_source import check_source, open_source
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


class Player:
    """Plays nothing, and notes what it is told to begin with."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def prepare(self, note: object) -> None:
        self.told.append("prepare")

    async def check(self, seed: int) -> int:
        self.told.append("check")
        return 1

    async def close(self) -> None:
        self.told.append("close")


@pytest.mark.parametrize("adopts", [False, True])
def test_a_run_that_is_taken_over_begins_no_task_to_see_whether_it_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adopts: bool
) -> None:
    """Its ``reset`` may ask a frozen model that is not up again."""
    player = Player()
    monkeypatch.setattr(trajectory_source, "_renderer", lambda *_: None)
    monkeypatch.setattr(trajectory_source, "_player", lambda *_, **__: player)

    async def scene() -> None:
        opened = open_source(recipe(), tmp_path, open_on=no_nodes, note=print, adopts=adopts)
        async with opened:
            player.told.append("open")

    asyncio.run(scene())
    assert player.told == ["prepare", *([] if adopts else ["check"]), "open", "close"]
