"""The machine under every fault at once, for a while; ``tests.campaign`` plays a million events."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign import CHANCES, campaign
from tests.world import Faults

KINDS = sorted(field.name for field in fields(Faults) if getattr(CHANCES, field.name))


def chances(kinds: set[str], often: int) -> Faults:
    """Faults of these kinds, so many times as often as in the campaign."""
    some: dict[str, Any] = {kind: one for kind, one in asdict(CHANCES).items() if kind in kinds}
    poison = {kind: max(5, one // often) for kind, one in some.items() if isinstance(one, int)}
    return Faults(**{kind: min(0.9, one * often) for kind, one in some.items()} | poison)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    events=st.integers(1, 600),
    kinds=st.sets(st.sampled_from(KINDS)),
    often=st.sampled_from([1, 5, 20]),
)
def test_whatever_happens_nothing_is_lost_trained_twice_or_left(seed, events, kinds, often):
    assert campaign(seed, events, chances(kinds, often)).events >= events


@pytest.mark.parametrize(("rate", "steps", "faults"), [(1.0, 25, 25), (8.0, 15, 150)])
def test_a_campaign_takes_steps_under_all_faults_and_drops_only_what_does_harm(rate, steps, faults):
    result = campaign(5, 2000, rate=rate)
    assert result.steps > steps
    assert result.faults.total() > faults
