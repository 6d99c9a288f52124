"""The comparison of routers on unlike servers: the same groups, and the same number of GPUs."""

from __future__ import annotations

import sys

import pytest

from tests.research import unlike_servers as research


def test_every_policy_plays_the_mixture_on_as_many_gpus_as_alike_servers_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = ["--trace", "mint", "--bounds", "0,1", "--seeds", "2", "--published"]
    monkeypatch.setattr(sys, "argv", ["unlike_servers", *typed])
    jobs = list(research.jobs_of(research.arguments()))
    # Nothing may be late at a bound of 0, so there is one rule.
    assert len({job.variant for job in jobs}) == 3
    assert len(jobs) == 3 * 2 * (1 + len(research.POLICIES))
    for job in jobs:
        assert job.layout is not None
        assert {bucket.max_num_seqs for bucket in job.layout.buckets} == {32}
    cells = {(job.variant, job.seed) for job in jobs}
    for cell in cells:
        mine = [job for job in jobs if (job.variant, job.seed) == cell]
        layouts = [job.layout for job in mine if job.layout is not None]
        assert len({layout.rollout_gpus for layout in layouts}) == 1
        assert sorted(len(layout.buckets) > 1 for layout in layouts) == [False, *[True] * 4]


def test_gains_are_told_seed_by_seed() -> None:
    told = {"trace": "made up", "rule": "hold 1", "servers": "some"}
    rates = {"alike": 100.0, "libra": 110.0, "cmlfq": 99.0, "no tool signals": 99.0}
    rates["known-levels"] = 121.0
    rows = [
        {**told, "seed": seed, "who": who, "tokens_per_s": (1 + seed) * rate}
        for seed in range(3)
        for who, rate in rates.items()
    ]
    lines = list(research.table_of(rows))
    assert "    mixed over alike: +10.0 ± 0.0 %" in lines
    assert "    cmlfq over libra: -10.0 ± 0.0 %" in lines
    assert "    cmlfq over no tool signals: +0.0 ± 0.0 %" in lines
    assert "    known-levels over libra: +10.0 ± 0.0 %" in lines
