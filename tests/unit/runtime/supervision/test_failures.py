"""How an exception is told."""

from libra_cli.runtime.supervision.failures import MOST_CHARACTERS, words_of


def test_the_words_of_an_error_are_one_short_line():
    assert words_of(KeyError()) == "KeyError"
    assert words_of(ValueError("broken \n text")) == "ValueError: broken text"
    long = words_of(ValueError("x\n" * 10**6))
    assert "\n" not in long
    assert len(long) < MOST_CHARACTERS + 20
