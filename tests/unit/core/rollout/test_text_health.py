"""Repetition is seen on token ids, and only where it is repetition."""

from __future__ import annotations

from array import array

import pytest

from libra_cli.core.rollout.text_health import NGRAM, TIMES, repeats, text_metrics
from libra_cli.core.types import Branch, Trajectory, TrajectoryId, VersionSpan

LOOP = list(range(100, 100 + NGRAM))


def branch(*turns: list[int], answers: list[list[int]] | None = None) -> Branch:
    """Turns that follow a prompt and one another, with what tools answered, or else numbers."""
    made = Branch(token_ids=array("i", [1, 2, 3]))
    for number, turn in enumerate(turns):
        start = len(made.token_ids)
        made.token_ids.extend(turn)
        made.spans.append(VersionSpan(0, start, start + len(turn)))
        made.token_ids.extend(answers[number] if answers else [number])
    return made


def played(*exchanges: tuple[str, str]) -> Branch:
    """A conversation, its UTF-8 bytes for tokens."""
    said, told = zip(*exchanges, strict=True)
    return branch(*(list(one.encode()) for one in said), answers=[list(o.encode()) for o in told])


def test_text_that_occurs_again_and_again_is_repetition() -> None:
    assert repeats(branch(list(range(50)) + LOOP * TIMES))
    assert repeats(branch([5] * (NGRAM + TIMES - 1)))


def test_text_that_occurs_twice_is_none() -> None:
    assert not repeats(branch(list(range(50)) + LOOP * (TIMES - 1)))
    assert not repeats(branch([5] * (NGRAM + TIMES - 2)))


def test_a_tool_that_is_called_the_same_way_every_turn_is_no_repetition() -> None:
    assert not repeats(branch(*[LOOP] * 10))


SEARCH = '{"name": "search", "arguments": {"query": "capital of Burkina Faso"}}'
NOTHING = "No results. Try other words."
LOOK = ("look", "You are in the kitchen. There is a fridge and an exit to the east.")


def test_asking_the_same_and_being_told_the_same_is_repetition_however_short() -> None:
    assert repeats(played(*[(SEARCH, NOTHING)] * 4))
    assert repeats(played(*[("go east", "You cannot go east."), LOOK] * 3, ("go north", "A hall.")))
    assert repeats(played(("inventory", "Nothing."), *[("ok", "What next?")] * 5))


def test_the_same_words_for_something_else_are_no_repetition() -> None:
    pages = [
        ('{"name": "next_page"}', f"Page {number} of 9: {number * 7919}") for number in range(9)
    ]
    assert not repeats(played(*pages))
    assert not repeats(played(*[(SEARCH, NOTHING)] * 2, ("It is Ouagadougou.", "")))
    rooms = [(f"open door {number}", f"Room {number}.") for number in range(5)]
    assert not repeats(played(*(one for room in rooms for one in (room, LOOK))))


def test_a_turn_that_two_versions_generated_is_one_turn() -> None:
    made = branch(list(range(50)) + LOOP * TIMES)
    (whole,) = made.spans
    middle = whole.end - NGRAM - 2
    made.spans = [VersionSpan(0, whole.start, middle), VersionSpan(1, middle, whole.end)]
    assert repeats(made)


def test_a_number_that_ends_in_the_bytes_of_another_is_not_it() -> None:
    assert not repeats(branch([256**3, 1, 256, 65536] * 4))


def test_only_generated_tokens_count() -> None:
    made = branch([9])
    made.token_ids.extend(LOOP * 9)
    assert not repeats(made)


def test_shares_are_of_trajectories_and_of_calls() -> None:
    members = [Trajectory(TrajectoryId(0, n)) for n in range(4)]
    for n, member in enumerate(members):
        member.reward, member.generated, member.tools = float(n), 10 * n, 2
    members[0].unreadable = 2
    members[1].token_ids, members[1].spans = array("i", LOOP * 3), [VersionSpan(0, 0, 3 * NGRAM)]
    told = text_metrics(members)
    assert told["share_repeated"] == 0.25
    assert told["share_unreadable"] == 0.25
    assert told["reward_length_correlation"] == pytest.approx(1.0)


def test_what_no_trajectory_tells_is_unknown() -> None:
    told = text_metrics([Trajectory(TrajectoryId(0, 0))])
    assert told["share_unreadable"] is None
    assert told["reward_length_correlation"] is None
