"""The last word of an answer counts, and a wrong answer may be given once more."""

from __future__ import annotations

import pytest

from libra_cli.envs.opposites import PAIRS, Opposites
from libra_cli.envs.protocol import Environment

HOT = {"word": "hot", "opposite": "cold"}


def begun(tries: int = 2) -> Opposites:
    game = Opposites(tries=tries)
    game.reset(HOT, 0)
    return game


def test_it_is_an_environment_whose_tasks_are_the_same_again():
    game = Opposites()
    assert isinstance(game, Environment)
    tasks = [game.task(index, 7) for index in range(400)]
    assert tasks == [Opposites().task(index, 7) for index in range(400)]
    assert len({task["word"] for task in tasks}) > len(PAIRS) / 2


def test_no_word_has_two_opposites():
    assert len({word for word, _ in PAIRS}) == len(PAIRS)
    assert all(left and right and left != right for left, right in PAIRS)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("cold", 1.0),
        ("The opposite of hot is cold.", 1.0),
        ("Cold!\n", 1.0),
        ("cold, cool", 0.0),
        ("coldness", 0.0),
        ("Cold is the opposite of hot.", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_word_counts(answer: str, reward: float):
    assert begun().score(answer) == reward


def test_the_user_asks_again_after_a_wrong_answer_while_there_are_tries():
    game = begun(tries=2)
    assert game.reply("cool") is not None
    assert game.reply("cool") is None
    assert begun(tries=1).reply("cool") is None
    assert begun(tries=2).reply("cold") is None


def test_fewer_than_one_try_is_refused():
    with pytest.raises(ValueError, match="tries must be 1 or more, got 0"):
        Opposites(tries=0)
