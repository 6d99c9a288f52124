"""Games of OpenSpiel and TextArena: each player is a role, and the packages' rules are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pyspiel
import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.openspiel import OpenSpiel, named
from libra_cli.envs.gyms.textarena import TextArena
from libra_cli.envs.protocol import Finished, Message, NextTurn, Reply, Task
from tests import kuhn_poker

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

Choose = Callable[[Any, random.Random], str]
GAMES = ("kuhn_poker", "leduc_poker(players=3)", "tic_tac_toe", "goofspiel", "backgammon", "hanabi")


def at_random(game: OpenSpiel, rng: random.Random) -> str:
    return rng.choice([*game.actions()])


def played(game: Any, task: Task, choose: Choose, rng: random.Random) -> list[NextTurn]:
    turns = [game.reset(task, seed=0)]
    while not turns[-1].done:
        said = game.reply(choose(game, rng))
        assert isinstance(said, NextTurn)
        turns.append(said)
    return turns


@pytest.mark.parametrize("name", GAMES)
def test_a_role_earns_what_openspiel_pays_that_player(name: str) -> None:
    rng = random.Random(name)
    for index in range(5):
        game = OpenSpiel(name)
        turns = played(game, game.task(index, seed=1), at_random, rng)
        history = game._at.history()
        again = pyspiel.load_game_as_turn_based(name).new_initial_state()
        movers = []
        for action in history:
            if not again.is_chance_node():
                movers.append(f"player_{again.current_player()}")
            again.apply_action(action)
        assert again.is_terminal()
        assert [one.role for one in turns[:-1]] == movers
        assert game.score("") == dict(zip(game.roles, again.returns(), strict=True))


def test_the_members_of_a_group_are_dealt_the_same_and_others_are_not() -> None:
    def dealt(index: int) -> str:
        game = OpenSpiel("leduc_poker")
        return str(game.reset(game.task(index, seed=3), seed=index + 7).messages[0]["content"])

    assert [dealt(index) for index in range(12)] == [dealt(index) for index in range(12)]
    assert len({dealt(index) for index in range(12)}) > 1


def test_a_player_reads_its_own_card_and_what_was_bet_and_nothing_of_the_others() -> None:
    found = kuhn_poker.decisions()
    assert set(found) == {card + bets for card in "012" for bets in ("", "p", "b", "pb")}
    for state, conversation in found.items():
        texts = [one["content"] for one in conversation if one["role"] == "user"]
        assert texts[-1] == f"{state}\nActions: Pass, Bet"
        assert {text[0] for text in texts} == {state[0]}


def test_an_answer_is_the_action_that_it_is_or_names_last() -> None:
    names = {"o(0,0)": 0, "o(0,1)": 1, "Pass": 2, "Pass all": 3}
    assert named(" pass\n", names) == "Pass"
    assert named("not o(0,0) but o(0,1).", names) == "o(0,1)"
    assert named("I Pass all", names) == "Pass all"
    assert named("passing", names) is None


def test_case_tells_names_apart_that_differ_by_nothing_else() -> None:
    chess = {"bxc3": 0, "Bxc3": 1, "O-O": 2}
    for one in ("bxc3", "Bxc3"):
        assert named(f"{one}\n", chess) == one
        assert named(f"I play {one}.", chess) == one
    assert named("castle: o-o", chess) == "O-O"


def test_an_answer_that_names_no_action_is_told_and_then_loses_the_game() -> None:
    game = OpenSpiel(retries=1)
    first = game.reset(game.task(0, seed=0), seed=0)
    told = game.reply("hm")
    assert isinstance(told, Reply)
    assert told.messages[0]["content"] == "That is no action.\nActions: Pass, Bet"
    with pytest.raises(Finished, match="no action; they were Pass, Bet"):
        game.reply("hm")
    assert game.score("") == {"player_0": -2.0, "player_1": 0.0}
    assert first.role == "player_0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"game": "nope"}, "no game 'nope'"), ({"game": "hanabi", "state": "information"}, "cannot")],
)
def test_what_openspiel_does_not_have_is_told(arguments: Mapping[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentBroken, match=words) as caught:
        OpenSpiel(**arguments)
    assert caught.value.hint.startswith("environment.args.")


def test_whoever_has_three_in_a_row_wins_textarenas_tic_tac_toe() -> None:
    game = TextArena("TicTacToe-v0")
    turn = game.reset(game.task(0, seed=0), seed=0)
    first = turn.role
    for cell in (0, 3, 1, 4, 2):
        turn = game.reply(f"[{cell}]")
    assert turn.done
    (second,) = {*game.roles} - {first}
    assert game.score("") == {first: 1.0, second: -1.0}


def test_a_move_that_textarena_does_not_take_is_told_once_and_then_lost() -> None:
    game = TextArena("TicTacToe-v0")
    mover = game.reset(game.task(0, seed=0), seed=0).role
    told = game.reply("hm")
    assert (told.role, told.done) == (mover, False)
    assert "invalid move" in told.messages[0]["content"]
    assert game.reply("hm").done
    assert game.score("")[mover] == -1.0


def test_games_that_are_played_side_by_side_are_those_that_are_played_alone() -> None:
    def begun(index: int) -> tuple[TextArena, list[Message]]:
        game = TextArena()
        return game, [*game.reset(game.task(index, seed=5), seed=0).messages]

    def rounds(*indices: int) -> list[list[Message]]:
        games = [begun(index) for index in indices]
        for _ in range(4):
            for game, heard in games:
                heard += game.reply("[check]").messages
        return [heard for _, heard in games]

    before = random.getstate()
    assert rounds(0, 1, 2) == [*rounds(0), *rounds(1), *rounds(2)]
    assert random.getstate() == before


def test_textarena_has_no_game_of_another_name() -> None:
    with pytest.raises(EnvironmentBroken, match="no game 'Nope-v0'") as caught:
        TextArena("Nope-v0")
    assert "KuhnPoker-v0" in caught.value.hint
