"""What the baselines expect a trajectory to have left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.scheduling.causal_tree import CausalTree
from libra_cli.core.scheduling.estimators import (
    IDLE_GROUPS,
    Estimator,
    PaperTree,
    SiblingMean,
    bucket_of,
    state_of,
)
from libra_cli.core.types import ToolOutcome, ToolReturn, TrajectoryId

EVERY = (SiblingMean, PaperTree, CausalTree)
OK = ToolReturn("search", ToolOutcome.OK, 1.0, 400)
ERROR = ToolReturn("edit", ToolOutcome.ERROR, 1.0, 400)
CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40)


def play(
    estimator: Estimator, trajectory: TrajectoryId, turns: list[int], *, end: bool = True
) -> list[float]:
    """Turns of so many tokens each; the answers."""
    answers, generated = [estimator.begin(trajectory)], 0
    for tokens in turns[:-1]:
        generated += tokens
        answers.append(estimator.returned(trajectory, generated=generated, returns=(OK,)))
    if end:
        estimator.finished(trajectory, generated=sum(turns))
    return answers


def drive(estimator: Estimator, calls: list[tuple[int, int]]) -> list[float | None]:
    """Any order of calls: (who, what), what of 0: a return, 1: the end, 2: withdrawn."""
    answers: list[float | None] = []
    attained: dict[int, int] = {}
    attempts: dict[int, int] = {}
    for number, (who, what) in enumerate(calls):
        trajectory = TrajectoryId(who // 2, who % 2, attempts.get(who, 0))
        answer = None
        if who not in attained:
            attained[who] = 0
            answer = estimator.begin(trajectory)
        elif what == 0:
            attained[who] += 10 + number
            answer = estimator.returned(trajectory, generated=attained[who], returns=(OK,))
        else:
            total = attained.pop(who)
            attempts[who] = attempts.get(who, 0) + 1
            if what == 1:
                estimator.finished(trajectory, generated=total + 5)
            else:
                estimator.withdrawn(trajectory)
        answers.append(answer)
    return answers


@pytest.mark.parametrize("make", EVERY)
def test_every_estimator_answers_before_it_has_seen_anything(make: type[Estimator]) -> None:
    answers = play(make(), TrajectoryId(0, 0), [10, 10, 10])
    assert len(answers) == 3
    assert min(answers) > 0


@pytest.mark.parametrize("make", EVERY)
@given(past=CALLS, future=CALLS, other=CALLS)
def test_answers_do_not_depend_on_calls_that_come_later(
    make: type[Estimator],
    past: list[tuple[int, int]],
    future: list[tuple[int, int]],
    other: list[tuple[int, int]],
) -> None:
    assert drive(make(), past + future)[: len(past)] == drive(make(), past + other)[: len(past)]


def test_the_siblings_mean_is_less_what_was_spent_and_falls_back_to_the_turns() -> None:
    estimator = SiblingMean()
    play(estimator, TrajectoryId(0, 0), [10, 20, 30])
    play(estimator, TrajectoryId(1, 0), [10, 90])
    assert play(estimator, TrajectoryId(1, 1), [40, 30, 40, 5]) == [100, 60, 30, 30]
    assert play(estimator, TrajectoryId(2, 0), [5, 5], end=False) == [275 / 3, 215 / 3]


def test_groups_that_are_done_are_forgotten_in_the_end() -> None:
    estimator = SiblingMean()
    for number in range(IDLE_GROUPS + 10):
        play(estimator, TrajectoryId(number, 0), [10])
    assert len(estimator._groups) == IDLE_GROUPS


def test_the_published_tree_trusts_one_visit_and_falls_back_to_the_parent() -> None:
    estimator = PaperTree()
    play(estimator, TrajectoryId(0, 0), [10, 20, 30])
    answers = play(estimator, TrajectoryId(0, 1), [99, 99, 99, 99], end=False)
    assert answers == [60, 50, 30, 30]
    assert estimator.agrees(TrajectoryId(0, 1), (20, 40)) == 1


def test_the_published_tree_forgets_what_is_withdrawn() -> None:
    estimator = PaperTree()
    who = TrajectoryId(0, 0)
    play(estimator, who, [10, 20], end=False)
    estimator.withdrawn(who)
    assert (estimator._paths, estimator._marks) == ({}, {})
    estimator.withdrawn(who)  # nobody knows it any more


def test_the_published_rule_gives_no_bucket_where_mean_and_p90_differ() -> None:
    estimator = PaperTree()
    for number, last in enumerate([10] * 8 + [1000] * 2):
        play(estimator, TrajectoryId(0, number), [10, last])
    play(estimator, TrajectoryId(0, 50), [10, 10], end=False)
    assert estimator.agrees(TrajectoryId(0, 50), (300,)) is None
    assert estimator.agrees(TrajectoryId(0, 50), (2000,)) == 0


def test_the_published_tree_of_an_unknown_prompt_knows_only_the_mean_of_all() -> None:
    estimator = PaperTree()
    play(estimator, TrajectoryId(0, 0), [10, 20])
    assert play(estimator, TrajectoryId(1, 0), [10, 20], end=False) == [30, 30]


def test_a_state_is_the_last_tool_the_payload_and_the_worst_outcome() -> None:
    assert state_of((ERROR, OK)) == "search/1/error"
    assert state_of((OK,)) == "search/1/ok"
    assert state_of(()) == "-"


def test_a_remainder_at_a_bound_belongs_below_it() -> None:
    assert [bucket_of(tokens, (10, 20)) for tokens in (0, 10, 11, 20, 21)] == [0, 0, 1, 1, 2]
