"""Who began late, or has other GPUs than before, has as much more or less to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.cluster.partition import KEEP, Speeds


def test_a_trainer_that_was_resized_is_as_much_slower_at_once() -> None:
    speeds = Speeds(16)
    speeds.resized(16)
    speeds.trainer(1600.0, 10.0)
    speeds.resized(8)
    assert speeds.of_trainer() == 80.0
    speeds.resized(8)
    assert speeds.of_trainer() == 80.0
    unknown = Speeds(16)
    unknown.resized(4)
    assert unknown.of_trainer() == 4.0


SECONDS = st.floats(0.0, 100.0)


def test_what_the_trainer_waited_says_how_late_a_worker_began() -> None:
    speeds = Speeds(8)
    speeds.trainer(1000.0, 10.0)
    speeds.fetched("a", 2.0)
    assert speeds.lag_s("a") == 2.0
    speeds.took("a", 12.0, 10.0, 5.0)
    assert speeds.lag_s("a") == 2.0 + 3.0
    speeds.took("a", 12.0, 10.0, 3.0)
    assert speeds.lag_s("a") == pytest.approx(2.0 + KEEP * 3.0 + (1 - KEEP) * 1.0)


def test_the_least_transfer_that_was_guessed_counts_until_one_is_measured() -> None:
    speeds = Speeds(8)
    speeds.trainer(1000.0, 10.0)
    for transfer_s in (3.0, 2.0, 5.0):
        speeds.would_fetch("a", transfer_s)
    assert speeds.transfer_s("a") == 2.0
    speeds.fetched("a", 4.0)
    assert speeds.transfer_s("a") == 4.0


def test_a_transfer_costs_nothing_while_speeds_are_no_tokens_a_second() -> None:
    speeds = Speeds(8)
    speeds.would_fetch("a", 3.0)
    assert speeds.transfer_s("a") == 0.0
    speeds.trainer(1000.0, 10.0)
    assert speeds.transfer_s("a") == 3.0


def test_a_worker_that_was_not_waited_for_is_late_by_what_was_left_at_most() -> None:
    speeds = Speeds(8)
    speeds.took("a", 8.0, 10.0, 0.0)
    assert speeds.lag_s("a") == 0.0, "nobody knows"
    speeds.took("a", 10.0, 10.0, 4.0)
    speeds.took("a", 9.0, 10.0, 0.0)
    assert speeds.lag_s("a") == 1.0


@given(busy_s=SECONDS, own_s=SECONDS, waited_s=SECONDS)
def test_nobody_begins_before_the_step(busy_s: float, own_s: float, waited_s: float) -> None:
    speeds = Speeds(8)
    speeds.took("a", busy_s, own_s, waited_s)
    assert 0.0 <= speeds.lag_s("a") <= own_s + waited_s
