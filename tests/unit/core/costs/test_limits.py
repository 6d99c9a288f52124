"""Nothing that a recipe forbids is expected: work is cut where a run would end it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libra_cli.core.workload import TrajectoryLimits, TrajectorySample, Workload

LIMITS = st.builds(
    TrajectoryLimits,
    max_len=st.integers(1, 5000),
    max_turns=st.integers(1, 20),
    max_turn_tokens=st.integers(1, 1000),
)
SAMPLES = st.builds(
    TrajectorySample,
    prompt=st.integers(0, 6000),
    generated=st.integers(1, 20_000),
    observed=st.integers(0, 6000),
    turns=st.integers(1, 60),
    tool_s=st.floats(0, 300),
)


SAMPLE = TrajectorySample(1, 1)
LEAST: dict[str, Any] = {"trajectories": 1, "overlap": 1.0, "late": 0, "group_size": 1}


@pytest.mark.parametrize(
    "less", [{"trajectories": 0}, {"overlap": 0.9}, {"late": -1}, {"group_size": 0}]
)
def test_a_workload_has_a_trajectory_a_group_and_a_step_at_least(less: dict[str, Any]) -> None:
    assert Workload((SAMPLE,), **LEAST).trajectories == 1
    with pytest.raises(ValueError, match="a workload needs trajectories"):
        Workload((SAMPLE,), **{**LEAST, **less})
    with pytest.raises(ValueError, match="at least one sample"):
        Workload((), **LEAST)


@pytest.mark.parametrize("field", ["prompt", "observed", "tool_s"])
def test_a_sample_has_a_token_and_nothing_negative(field: str) -> None:
    assert replace(SAMPLE, **{field: 0}).generated == 1
    with pytest.raises(ValueError, match="nothing negative"):
        replace(SAMPLE, **{field: -1})
    with pytest.raises(ValueError, match="a token or more"):
        TrajectorySample(1, 0)


@given(sample=SAMPLES, limits=LIMITS)
@example(TrajectorySample(50, 30, 20, turns=4, tool_s=2.0), TrajectoryLimits(1, 1, 1))
@example(TrajectorySample(50, 30, 20, turns=5, tool_s=2.0), TrajectoryLimits(75, 9, 6))
def test_what_is_cut_is_allowed_and_what_is_allowed_is_not_cut(
    sample: TrajectorySample, limits: TrajectoryLimits
) -> None:
    cut = limits.cut(sample)
    assert limits.allow(cut)
    assert limits.cut(cut) == cut
    assert (cut == sample) == limits.allow(sample)


@given(sample=SAMPLES, limits=LIMITS)
def test_a_cut_trajectory_is_less_of_everything(
    sample: TrajectorySample, limits: TrajectoryLimits
) -> None:
    cut = limits.cut(sample)
    assert cut.prompt <= sample.prompt
    assert cut.generated <= sample.generated
    assert cut.observed <= sample.observed
    assert cut.turns <= sample.turns
    assert cut.tool_s <= sample.tool_s


def test_tools_turns_and_observations_shrink_with_the_tokens() -> None:
    sample = TrajectorySample(100, 1000, 500, turns=10, tool_s=20.0)
    assert TrajectoryLimits(850, 99, 999).cut(sample) == TrajectorySample(100, 500, 250, 5, 10.0)
    assert TrajectoryLimits(9999, 4, 999).cut(sample) == TrajectorySample(100, 400, 200, 4, 8.0)
    assert TrajectoryLimits(9999, 99, 50).cut(sample) == replace(sample, generated=500)


@given(
    samples=st.lists(SAMPLES, min_size=1, max_size=8), limits=LIMITS, factor=st.floats(0.01, 100)
)
def test_work_is_within_its_limits_however_it_is_stretched(
    samples: list[TrajectorySample], limits: TrajectoryLimits, factor: float
) -> None:
    work = Workload(tuple(samples), 64, limits=limits)
    for each in (work, work.stretched(factor), work.stretched(factor).stretched(factor)):
        assert all(map(limits.allow, each.samples))
        assert each.longest.context <= limits.max_len
