"""What an action ends in that could not be carried out."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any, get_args

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import GroupId, TrajectoryId

REASON = "ValueError: broken"
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
    failure = made(kind).failed(REASON)
    nobody_waits = {a.AbortTurn, a.AnswerOrder, a.ForgetEpisode}
    assert (failure is None) == (kind.must_end or kind in nobody_waits)
    if failure is not None:
        assert REASON in str(failure)


def test_a_failure_names_the_incarnation_and_the_request_of_its_action():
    failed = made(a.Generate).failed(REASON)
    assert isinstance(failed, e.TurnFailed)
    assert (failed.request, failed.slot, failed.incarnation) == (7, "a/0", 3)
    assert not failed.refused
