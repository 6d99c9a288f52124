"""The shipped prices of the mixture are what the law makes of the dense models' prices."""

from __future__ import annotations

import pytest

from libra_cli.sim.profiles import load_profile
from tests.research.mixture_profile import GPUS, derived_profile


@pytest.mark.parametrize("gpu", GPUS)
def test_the_shipped_profile_is_the_derived_one(gpu: str) -> None:
    assert load_profile(f"{gpu}-qwen3-30b-a3b") == derived_profile(gpu)


def test_it_says_that_nothing_of_it_was_measured() -> None:
    provenance = load_profile("a800-qwen3-30b-a3b").provenance
    assert "NOT MEASURED" in provenance["servers"]
    assert "NOT MEASURED" in provenance["training"]


def test_a_lone_request_is_faster_and_a_full_server_no_slower_than_of_a_dense_model() -> None:
    mixture, dense = (load_profile(f"a800-qwen3-{size}").servers[2] for size in ("30b-a3b", "32b"))
    assert mixture.decode_step_s(1, 1000) < 0.4 * dense.decode_step_s(1, 1000)
    assert mixture.decode_step_s(128, 100_000) < dense.decode_step_s(128, 100_000)
