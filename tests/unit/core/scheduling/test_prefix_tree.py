"""The causal prefix tree: shrinkage, fading, censoring, its bound, and what it saves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.scheduling.bins import BINS, BOUNDS, bin_of
from libra_cli.core.scheduling.prefix_tree import KAPPA, SILENT, PrefixTree, state_of
from libra_cli.core.types import ToolOutcome, ToolReturn

Observation = tuple[tuple[int, ...], float]
PATHS = st.lists(st.integers(0, 3), max_size=4).map(tuple)
HISTORIES = st.lists(st.tuples(PATHS, st.floats(0, 1e6)), max_size=30)


def grown(history: Sequence[Observation], tree: PrefixTree | None = None) -> PrefixTree:
    tree = tree or PrefixTree(half_life=10)
    for path, remaining in history:
        tree.observe(path, remaining)
    return tree


@given(HISTORIES, PATHS)
def test_an_estimate_is_a_distribution_without_zeros(history, path):
    estimate = grown(history).estimate(path)
    assert sum(estimate) == pytest.approx(1)
    assert min(estimate) > 0


def test_every_count_of_tokens_has_a_bin():
    assert [bin_of(tokens) for tokens in (0, 1, 8, 8.5, BOUNDS[-1], 1e12)] == [
        *(0, 0, 0, 1),
        *(BINS - 1, BINS - 1),
    ]


def test_a_path_never_seen_is_its_deepest_known_prefix():
    tree = grown([((1, 2), 500.0)] * 20)
    assert tree.estimate((1, 9, 9)) == tree.estimate((1,))
    assert tree.estimate((7,)) == tree.estimate(())
    assert tree.depth((1, 9)) == 1


def test_one_visit_moves_a_thin_node_by_one_part_in_kappa_and_one():
    tree = grown([((1,), 100.0)] * 50)
    tree.observe((2,), 50_000.0)
    parent, child = tree.estimate(()), tree.estimate((2,))
    moved = (1 - parent[bin_of(50_000)]) / (1 + KAPPA)
    assert child[bin_of(50_000)] == pytest.approx(parent[bin_of(50_000)] + moved)


def test_a_node_that_is_visited_often_forgets_its_parent():
    tree = grown([((1,), 100.0)] * 2000 + [((2,), 50_000.0)] * 2000)
    assert tree.estimate((2,))[bin_of(50_000)] > 0.98
    assert 0.4 < tree.estimate(())[bin_of(50_000)] < 0.6


def test_a_node_is_the_union_of_its_children():
    tree = grown([((1, 2), 10.0), ((1, 3), 10.0), ((1,), 10.0)])
    assert tree.weight((1,)) == 3
    assert tree.weight((1, 2)) + tree.weight((1, 3)) == 2
    assert tree.weight((5,)) == 0


def test_an_observation_is_worth_half_after_its_half_life():
    tree = grown([((1,), 10.0)] * 8)
    tree.tick(10)
    assert tree.weight((1,)) == pytest.approx(4)
    tree.observe((1,), 10.0)
    assert tree.weight((1,)) == pytest.approx(5)


def test_what_drifts_is_followed():
    tree = grown([((1,), 100.0)] * 100)
    tree.tick(60)
    grown([((1,), 10_000.0)] * 100, tree)
    assert tree.estimate((1,))[bin_of(10_000)] > 0.8


def test_a_censored_observation_counts_above_what_was_seen_and_nowhere_else():
    tree = grown([((1,), 100.0)] * 30 + [((1,), 5_000.0)] * 10)
    before = tree.estimate((1,))
    tree.observe_censored((1,), 1_000.0)
    after = tree.estimate((1,))
    assert tree.weight((1,)) == pytest.approx(41)
    assert after[bin_of(100)] < before[bin_of(100)]
    assert after[bin_of(5_000)] > before[bin_of(5_000)]


def test_censored_lengths_do_not_make_the_estimate_short():
    """Exponential lengths cut at 400: ignoring the cut halves the mean, censoring keeps it."""
    random = Random(0)
    censoring, ignoring = PrefixTree(), PrefixTree()
    for _ in range(3000):
        length = random.expovariate(1 / 400)
        if length <= 400:
            censoring.observe((), length)
            ignoring.observe((), length)
        else:
            censoring.observe_censored((), 400)
    above = [sum(tree.estimate(())[bin_of(400) + 1 :]) for tree in (censoring, ignoring)]
    assert above[1] < 0.05
    assert 0.25 < above[0] < 0.45


def test_the_tree_never_has_more_nodes_than_its_cap():
    random = Random(1)
    tree = PrefixTree(cap=200)
    for _ in range(3000):
        tree.observe(tuple(random.randrange(9) for _ in range(5)), 100.0)
        assert len(tree) <= 200


def test_what_is_used_least_is_dropped_first():
    random = Random(1)
    tree = PrefixTree(cap=100)
    for number in range(2000):
        tree.observe(("often",), 100.0)
        tree.observe((random.randrange(10**6), number), 100.0)
    assert tree.weight(("often",)) == pytest.approx(2000)


def test_a_node_takes_about_a_kilobyte():
    tree = grown([((1,), float(2**i)) for i in range(4, 18)])
    tree.log_odds((1,))
    node = tree._root.children[1]
    held = (node, node.counts, node.shares, node.odds, node.children)
    assert sum(map(sys.getsizeof, held)) < 1400


@given(HISTORIES, PATHS)
def test_a_tree_that_was_saved_answers_as_before(history, path):
    tree = grown(history)
    tree.tick(3)
    copy = PrefixTree(half_life=10)
    copy.restore(json.loads(json.dumps(tree.state())))
    assert copy.estimate(path) == pytest.approx(tree.estimate(path))
    assert len(copy) == len(tree)


@given(HISTORIES, HISTORIES, PATHS)
def test_merging_two_trees_is_observing_both_histories(mine, theirs, path):
    merged = grown(mine)
    merged.merge(grown(theirs).state())
    assert merged.estimate(path) == pytest.approx(grown(mine + theirs).estimate(path))
    assert len(merged) == len(grown(mine + theirs))


def test_a_merge_keeps_the_age_of_either_side():
    old, new = grown([((1,), 10.0)] * 8), grown([((1,), 10.0)] * 8)
    old.tick(10)
    new.merge(old.state())
    assert new.weight((1,)) == pytest.approx(8 + 4)


def test_a_merge_respects_the_cap():
    tree, other = PrefixTree(cap=50), PrefixTree(cap=500)
    for key in range(400):
        other.observe((key,), 10.0)
    tree.merge(other.state())
    assert len(tree) <= 50


def returned(tool: str, outcome: ToolOutcome = ToolOutcome.OK, size: int = 10) -> ToolReturn:
    return ToolReturn(tool, outcome, 1.0, size)


def test_a_state_is_tool_payload_class_and_outcome():
    assert state_of((returned("edit", ToolOutcome.ERROR, 1000),)) == "edit/2/error"
    assert state_of(()) == SILENT


def test_several_returns_make_one_state_of_the_last_tool_the_sum_and_the_worst():
    returns = (returned("a", ToolOutcome.TIMEOUT, 150), returned("b", ToolOutcome.OK, 150))
    assert state_of(returns) == "b/1/timeout"
