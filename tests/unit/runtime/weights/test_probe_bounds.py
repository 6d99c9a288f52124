"""How far the probe may be off: measured where both sides hold the same weights."""

from __future__ import annotations

import math

import pytest

from libra_cli.runtime.weights.probe_bounds import GAP_FACTOR, LEAST_GAP, WRONG_GAP, GapBounds


def test_the_first_gap_sets_the_bound_of_the_later_ones():
    bounds = GapBounds(None)
    assert not bounds.reason("a/0", 0, 0.05)
    assert not bounds.reason("a/0", 0, 0.05 * GAP_FACTOR)
    assert "allowed is 0.25" in bounds.reason("a/0", 0, 0.05 * GAP_FACTOR * 1.01)
    assert not bounds.reason("a/0", 0, 0.05), "a larger one has not widened it, nor a refusal"


def test_a_gap_that_is_tiny_at_first_may_be_small_later():
    bounds = GapBounds(None)
    assert not bounds.reason("a/0", 0, 1e-7)
    assert not bounds.reason("a/0", 0, LEAST_GAP)
    assert bounds.reason("a/0", 0, 2 * LEAST_GAP)


@pytest.mark.parametrize("first", [WRONG_GAP / 2, WRONG_GAP])
def test_a_large_first_gap_allows_no_wrong_one_later(first):
    bounds = GapBounds(None)
    assert not bounds.reason("a/0", 0, first)
    assert not bounds.reason("a/0", 0, WRONG_GAP)
    assert bounds.reason("a/0", 0, 1.01 * WRONG_GAP)


@pytest.mark.parametrize("gap", [1.1 * WRONG_GAP, math.inf, math.nan])
def test_what_no_right_computation_gives_calibrates_nothing(gap):
    bounds = GapBounds(None)
    assert bounds.reason("a/0", 0, gap)
    assert not bounds.reason("a/0", 0, 0.01)


def test_every_process_is_measured_by_itself():
    bounds = GapBounds(None)
    assert not bounds.reason("a/0", 0, 1e-6)
    assert not bounds.reason("b/0", 0, 0.1)
    assert bounds.reason("a/0", 0, 0.1)
    assert not bounds.reason("a/0", 1, 0.1), "a new process"


def test_a_bound_in_the_recipe_is_the_bound():
    bounds = GapBounds(0.02)
    assert not bounds.reason("a/0", 0, 0.02)
    assert (
        bounds.reason("a/0", 0, 0.021) == "the probe differs by 0.021 nats a token, allowed is 0.02"
    )
