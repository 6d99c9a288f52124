"""The last word of an answer counts, and a wrong answer may be given once more."""

from __future__ import annotations

import pytest

from libra_cli.envs.opposites import HELD_OUT, TRAIN, WORDS, Opposites
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
    assert tasks[:72] != [Opposites().task(index, 8) for index in range(72)]


@pytest.mark.parametrize("words", WORDS)
def test_every_word_is_asked_for_once_before_any_comes_again(words: str):
    pairs = WORDS[words]
    stream = [Opposites(words=words).task(index, 7) for index in range(2 * len(pairs))]
    first, second = stream[: len(pairs)], stream[len(pairs) :]
    for deal in (first, second):
        assert sorted((task["word"], task["opposite"]) for task in deal) == sorted(pairs)
    assert first != second


def test_no_word_has_two_opposites():
    pairs = WORDS["all"]
    assert len({word for word, _ in pairs}) == len(pairs)
    assert all(left and right and left != right for left, right in pairs)


def test_no_held_out_word_is_in_what_is_trained_on():
    assert not {word for pair in TRAIN for word in pair} & {
        word for pair in HELD_OUT for word in pair
    }
    assert (len(TRAIN), len(HELD_OUT)) == (40, 32)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="words must be one of all, train, held_out, got test"):
        Opposites(words="test")


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
