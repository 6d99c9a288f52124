"""Which commands of a model a text adventure is given."""

from __future__ import annotations

import pytest

from libra_cli.envs.gyms.textworld import is_for_game


@pytest.mark.parametrize(
    "text", ["take save from chest", "look. go east", "go to bed then undress", "examine tw-chest"]
)
def test_commands_of_the_game_reach_it(text: str) -> None:
    assert is_for_game(text)


@pytest.mark.parametrize(
    "text",
    [
        "save",
        "Save.",
        "save!",
        '"restore"',
        "look. restart",
        "look, quit",
        "look then undo",
        "transcripts",
        "look. tw-print",
    ],
)
def test_commands_to_the_interpreter_do_not_whatever_is_around_them(text: str) -> None:
    assert not is_for_game(text)
