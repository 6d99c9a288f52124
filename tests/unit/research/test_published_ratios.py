"""The law shows the published trade-offs with constants one can name; the shipped ones do not."""

from __future__ import annotations

import pytest

from libra_cli.sim.profiles import load_profile
from tests.research import published_ratios
from tests.research.published_ratios import (
    Constants,
    publication_row,
    publication_table,
    shipped_row,
    training_growth,
)

PROFILE = load_profile("a800-qwen3-14b")


def test_32_seats_and_little_cache_reproduce_the_crossover() -> None:
    row = publication_row(PROFILE, Constants(0.004, 0.0, 32, 0.15))
    assert row.short_ratio == pytest.approx(3.1, rel=0.15)
    assert row.long_ratio == pytest.approx(2.8, rel=0.15)


def test_rollout_time_grows_much_faster_than_length() -> None:
    assert 64 < shipped_row(PROFILE).growth < 200


def test_a_cap_on_seats_is_what_favours_small_servers() -> None:
    ratios = [
        publication_row(PROFILE, Constants(0.004, 0.0, seats, 1.0)).short_ratio
        for seats in (32, 64, 128, 256)
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 2.5
    assert ratios[-1] < 1.0, "with kernel data and many seats the large server wins"


def test_little_cache_is_what_favours_large_ones() -> None:
    ratios = [
        publication_row(PROFILE, Constants(0.004, 0.0, 32, share)).long_ratio
        for share in (1.0, 0.5, 0.25, 0.15)
    ]
    assert ratios == sorted(ratios)


def test_training_grows_with_its_tokens_unless_a_step_is_mostly_fixed() -> None:
    growth, needed = training_growth(PROFILE)
    assert growth > 15
    assert needed > 100, "seconds a step, whatever is in it"


def test_the_table_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (("STEPS_S", (0.0, 0.004)), ("SEQUENCES_S", (0.0,)), ("SEATS", (16, 64))):
        monkeypatch.setattr(published_ratios, name, values)  # the whole grid takes half a minute
    errors = [row.error for row in publication_table(PROFILE)]
    assert len(errors) == 2 * 1 * 2 * len(published_ratios.KV_SHARES)
    assert errors == sorted(errors)
