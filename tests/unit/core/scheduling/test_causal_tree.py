"""The causal tree: what a return says of what is left, how it ages, and how large it gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.scheduling.causal_tree import EDGES, KAPPA, CausalTree
from libra_cli.core.scheduling.estimators import GUESS, IDLE_GROUPS
from libra_cli.core.types import ToolOutcome, ToolReturn, TrajectoryId
from tests.unit.core.scheduling.test_estimators import CALLS, drive

OK = ToolReturn("search", ToolOutcome.OK, 1.0, 400)
ERROR = ToolReturn("search", ToolOutcome.ERROR, 1.0, 400)
LARGE = ToolReturn("search", ToolOutcome.OK, 1.0, 40_000)
OTHER = ToolReturn("edit", ToolOutcome.OK, 1.0, 400)
SHORT, LONG = 10, 5_000
BOUNDS = (100.0,)


def begin(tree: CausalTree, group: int, returned: ToolReturn) -> tuple[TrajectoryId, float]:
    """A trajectory that generates 50 tokens and gets this back; what is expected of it then."""
    who = TrajectoryId(group, 0)
    tree.begin(who)
    return who, tree.returned(who, generated=50, returns=(returned,))


def teach(tree: CausalTree, returned: ToolReturn, left: int, *, times: int, first: int = 0) -> None:
    for group in range(first, first + times):
        who, _ = begin(tree, group, returned)
        tree.finished(who, generated=50 + left)


def taught(*, half_life: float = 4000.0, cap: int = 20_000) -> CausalTree:
    """After a success little is left, after an error much."""
    tree = CausalTree(half_life=half_life, cap=cap)
    teach(tree, OK, SHORT, times=60, first=1_000)
    teach(tree, ERROR, LONG, times=60, first=2_000)
    return tree


def test_before_anything_has_finished_it_guesses_and_moves_nothing() -> None:
    tree = CausalTree()
    who, expected = begin(tree, 0, OK)
    assert expected == GUESS
    assert tree.level(who, BOUNDS) == 0


@pytest.mark.parametrize("other", [ERROR, LARGE, OTHER], ids=["outcome", "size", "tool"])
def test_tool_size_and_outcome_of_a_return_each_tell_what_is_left(other: ToolReturn) -> None:
    tree = CausalTree()
    teach(tree, OK, SHORT, times=60, first=1_000)
    teach(tree, other, LONG, times=60, first=2_000)
    _, after_this = begin(tree, 1, OK)
    _, after_other = begin(tree, 2, other)
    assert after_this < 0.5 * after_other


def test_what_remains_is_that_of_those_who_had_generated_as_much() -> None:
    tree = CausalTree()
    for group in range(60):
        who = TrajectoryId(group, 0)
        tree.begin(who)
        for generated in range(1_000, 8_000, 1_000):
            tree.returned(who, generated=generated, returns=(OK,))
        tree.finished(who, generated=8_000)
    late = TrajectoryId(100, 0)
    tree.begin(late)
    answers = [
        tree.returned(late, generated=done, returns=(OK,)) for done in range(1_000, 8_000, 1_000)
    ]
    assert answers == sorted(answers, reverse=True)
    assert answers[0] > 6_000
    assert answers[-1] < 2_500


def test_as_many_tokens_in_more_turns_are_another_case() -> None:
    def played(tree: CausalTree, group: int, turns: int) -> tuple[TrajectoryId, float]:
        who, expected = TrajectoryId(group, 0), 0.0
        tree.begin(who)
        for turn in range(1, turns + 1):
            expected = tree.returned(who, generated=48 + turn, returns=(OK,))
        return who, expected

    tree = CausalTree()
    for group in range(60):
        who, _ = played(tree, 1_000 + group, 1)
        tree.finished(who, generated=49 + SHORT)
        who, _ = played(tree, 2_000 + group, 8)
        tree.finished(who, generated=56 + LONG)
    assert played(tree, 2, 8)[1] > LONG - 500
    assert played(tree, 1, 1)[1] < LONG - 1_500


def test_one_observation_counts_little_against_many_of_its_parent() -> None:
    tree = CausalTree()
    teach(tree, OK, SHORT, times=200, first=1_000)
    teach(tree, ERROR, LONG, times=1, first=2_000)
    _, expected = begin(tree, 1, ERROR)
    # Tool and outcome, size, and state before each know that one; what lies above has 201.
    share = 1 - (KAPPA / (KAPPA + 1)) ** 3
    above = (200 * SHORT + LONG) / 201
    assert expected == pytest.approx(share * LONG + (1 - share) * above, rel=1e-3)


def test_a_finished_sibling_says_what_it_generated_beyond() -> None:
    tree = taught()
    sibling = TrajectoryId(7, 1)
    tree.begin(sibling)
    tree.finished(sibling, generated=50 + 20_000)
    _, alone = begin(tree, 6, OK)
    _, beside = begin(tree, 7, OK)
    assert beside == pytest.approx((2 * alone + 20_000) / 3)


def test_a_sibling_that_had_ended_by_now_says_nothing() -> None:
    tree = taught()
    sibling = TrajectoryId(7, 1)
    tree.begin(sibling)
    tree.finished(sibling, generated=50)
    alone = begin(tree, 6, OK)[1]
    assert begin(tree, 7, OK)[1] == pytest.approx(alone, rel=0.01)


# -- levels ----------------------------------------------------------------------------------------


def test_a_trajectory_is_demoted_after_an_error_and_promoted_after_a_success() -> None:
    tree = CausalTree()
    for group in range(100):
        who = TrajectoryId(group, 0)
        tree.begin(who)
        tree.returned(who, generated=50, returns=(ERROR,))
        tree.returned(who, generated=5_000, returns=(OK,))
        tree.finished(who, generated=5_010)
    who, _ = begin(tree, 200, ERROR)
    assert tree.level(who, BOUNDS) == 1
    tree.returned(who, generated=5_000, returns=(OK,))
    assert tree.level(who, BOUNDS) == 0


@pytest.mark.parametrize("bound", [20.0, 200.0], ids=["mean", "p90"])
def test_it_stays_where_mean_and_p90_name_different_levels(bound: float) -> None:
    tree = CausalTree()
    # Of ten two have 1,000 left: a mean of 208 and a P90 of about 900.
    teach(tree, OK, SHORT, times=80, first=1_000)
    teach(tree, OK, 1_000, times=20, first=2_000)
    who, expected = begin(tree, 1, OK)
    assert expected == pytest.approx(208, rel=0.05)
    assert tree.level(who, (300.0,)) == 0
    assert tree.level(who, (bound,)) == 1  # now both are above
    assert tree.level(who, (300.0,)) == 1  # and it stays there while they differ
    assert tree.level(who, (2_000.0,)) == 0


def test_with_fewer_levels_than_before_the_last_one_is_for_the_rest() -> None:
    tree = taught()
    who, _ = begin(tree, 1, ERROR)
    assert tree.level(who, (5.0, 20.0)) == 2
    assert tree.level(who, (5.0,)) == 1
    assert tree.level(who, ()) == 0


# -- ageing and memory ------------------------------------------------------------------------


def test_what_was_observed_long_ago_gives_way_to_what_is_new() -> None:
    ageing, keeping = taught(half_life=50.0), taught(half_life=1e9)
    for tree in (ageing, keeping):
        teach(tree, ERROR, SHORT, times=60, first=3_000)
    new, old = (begin(tree, 1, ERROR)[1] for tree in (ageing, keeping))
    assert old == pytest.approx(LONG / 2, rel=0.1)
    assert new < 0.8 * old


def test_it_keeps_no_more_nodes_than_its_cap_and_first_forgets_what_was_used_longest_ago() -> None:
    tree = CausalTree(cap=60)
    teach(tree, ERROR, LONG, times=30)
    for number in range(500):
        tool = ToolReturn(f"tool-{number}", ToolOutcome.OK, 1.0, 400)
        teach(tree, tool, SHORT, times=1, first=1_000 + number)
        assert len(tree) <= 60
        begin(tree, 5_000, ERROR)  # is asked for, and so of use
    kept = begin(tree, 5_000, ERROR)[1]
    unseen = begin(tree, 5_001, OTHER)[1]
    assert kept > 2 * unseen


def test_groups_and_trajectories_that_are_done_are_forgotten() -> None:
    tree = CausalTree()
    for group in range(IDLE_GROUPS + 10):
        tree.begin(TrajectoryId(group, 0))
        tree.finished(TrajectoryId(group, 0), generated=10)
    assert len(tree._groups) == IDLE_GROUPS
    gone = TrajectoryId(9_999, 0)
    tree.begin(gone)
    tree.withdrawn(gone)
    tree.withdrawn(gone)  # nobody knows it any more
    assert tree._under_way == {}


@given(calls=CALLS, cap=st.integers(1, 12))
def test_no_node_outlives_its_parent_and_none_is_over_the_cap(
    calls: list[tuple[int, int]], cap: int
) -> None:
    tree = CausalTree(cap=cap)
    drive(tree, calls)
    assert len(tree) <= cap
    assert all(path[:-1] in tree._nodes for path in tree._nodes if path)


@given(calls=CALLS)
def test_what_is_expected_is_possible_and_the_same_every_time(calls: list[tuple[int, int]]) -> None:
    tree = CausalTree()
    answers = drive(tree, calls)
    assert answers == drive(CausalTree(), calls)
    for under_way in tree._under_way.values():
        if under_way.left is not None:
            assert 0 < under_way.left.mean < GUESS
            assert 0 < under_way.left.p90 <= EDGES[-1]
