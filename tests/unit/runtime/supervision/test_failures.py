"""What an exception means for the action that raised it."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any, get_args

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import GroupId, TrajectoryId
from libra_cli.runtime.supervision.failures import MOST_CHARACTERS, failure_of, must_end, words_of

ERROR = ValueError("broken \udcff\n text")
VALUES: dict[str, Any] = {
    "slot": "a/0",
    "incarnation": 3,
    "trajectory": TrajectoryId(GroupId(0), 0),
    "request": 7,
    "order": "mine",
    "prompt_ids": array("i", [1]),
}


def kinds(union: Any) -> list[type]:
    return list(get_args(union))


def made(kind: Any) -> Any:
    return kind(**{field.name: VALUES.get(field.name) for field in fields(kind)})


@pytest.mark.parametrize("kind", kinds(a.RuntimeAction), ids=lambda kind: kind.__name__)
def test_every_action_ends_in_a_failure_is_repeated_or_is_waited_for_by_nobody(kind):
    failure = failure_of(made(kind), ERROR)
    nobody_waits = {a.AbortTurn, a.AnswerOrder, a.ForgetEpisode}
    assert (failure is None) == (must_end(made(kind)) or kind in nobody_waits)
    if failure is not None:
        assert "ValueError: broken" in str(failure)


def test_a_failure_names_the_incarnation_and_the_request_of_its_action():
    failed = failure_of(made(a.Generate), ERROR)
    assert isinstance(failed, e.TurnFailed)
    assert (failed.request, failed.slot, failed.incarnation) == (7, "a/0", 3)
    assert not failed.refused


def test_the_words_of_an_error_are_one_short_line():
    assert words_of(KeyError()) == "KeyError"
    long = words_of(ValueError("x\n" * 10**6))
    assert "\n" not in long
    assert len(long) < MOST_CHARACTERS + 20
