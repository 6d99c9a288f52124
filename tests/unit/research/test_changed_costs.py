"""A profile is changed where an experiment says so, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.sim.profiles import load_profile
from tests.research.changed_costs import with_kv_share, with_overhead

PROFILE = load_profile("a800-qwen3-14b")


def test_an_overhead_takes_the_place_of_that_of_the_profile() -> None:
    slower = with_overhead(PROFILE, PROFILE.overhead_s + 0.02)
    for degree, cost in PROFILE.servers.items():
        more = slower.servers[degree].linear().step_s - cost.linear().step_s
        assert more == pytest.approx(0.02)
    assert with_overhead(slower, PROFILE.overhead_s).overhead_s == PROFILE.overhead_s


def test_a_share_of_the_cache_leaves_the_prices_as_they_are() -> None:
    less = with_kv_share(PROFILE, 0.5)
    for degree, cost in PROFILE.servers.items():
        half = cost.kv_tokens // 2
        assert less.servers[degree] == replace(cost.linear(), kv_tokens=half)
