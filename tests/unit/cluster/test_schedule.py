"""The schedule of a campaign is made by its seed, and has every kind of fault."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from tests.cluster.chaos import schedule
from tests.cluster.faults import KINDS

HOSTS = 3


def planned(seed: int, number: int = 300) -> list[list[tuple[str, int | None]]]:
    made = islice(schedule(seed, HOSTS, list(KINDS.values())), number)
    return [[(kind.name, host) for kind, host in one] for one in made]


def test_a_seed_makes_one_schedule():
    assert planned(1) == planned(1)
    assert planned(1) != planned(2)


def test_every_kind_comes_and_those_that_take_long_come_less_often():
    times = Counter(name for one in planned(1, 600) for name, _ in one)
    assert set(times) == set(KINDS)
    often = [times[name] for name, kind in KINDS.items() if kind.every == 1]
    rare = [times[name] for name, kind in KINDS.items() if kind.every == 6]
    assert min(often) > 2 * max(rare)


def test_two_faults_at_once_are_on_two_hosts_of_the_right_kind():
    pairs = [one for one in planned(1) if len(one) == 2]
    assert pairs
    assert all(first[1] != second[1] for first, second in pairs)
    for name, host in (fault for one in planned(1) for fault in one):
        right = {"serve": {0, 1}, "hybrid": {1}, "train": {2}, "any": {0, 1, 2}}
        assert host in right.get(KINDS[name].where, {None})
