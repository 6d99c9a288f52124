"""Simulations on every core: in order, of what no other process could be sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from libra_cli.core.costs.profile import NothingFits
from libra_cli.sim.side_by_side import side_by_side


def test_results_come_in_the_order_of_what_was_given_and_closures_may_be_given() -> None:
    def waits(seconds: float) -> Callable[[], float]:
        def wait() -> float:
            time.sleep(seconds)
            return seconds

        return wait

    given = [waits(0.2), waits(0.0), waits(0.1)]
    assert list(side_by_side(lambda wait: wait(), given)) == [0.2, 0.0, 0.1]


def test_each_runs_in_another_process() -> None:
    assert os.getpid() not in set(side_by_side(lambda _: os.getpid(), range(3)))


def test_nothing_given_is_nothing_found() -> None:
    assert list(side_by_side(lambda one: one, [])) == []


def test_an_error_arrives_as_it_was() -> None:
    def fails(_: int) -> None:
        raise NothingFits("GPUs", "three are too few", hint="give it more GPUs")

    with pytest.raises(NothingFits, match="three are too few") as caught:
        list(side_by_side(fails, [1, 2]))
    assert (caught.value.constraint, caught.value.hint) == ("GPUs", "give it more GPUs")
