"""The shipped profiles load, are what the calibration says, and a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from libra_cli.core.costs.mixtures import MixtureRefused
from libra_cli.core.costs.profile import ProfileError
from libra_cli.sim.profiles import (
    known_profiles,
    load_profile,
    proposed_profiles,
    require_gpu,
    require_law,
)
from tests.research.changed_costs import with_overhead


def test_twelve_profiles_are_proposed_and_one_is_not() -> None:
    models = ("qwen3-14b", "qwen3-30b-a3b", "qwen3-32b", "qwen3-8b")
    proposed = tuple(f"{g}-{m}" for g in ("a100", "a800", "h100") for m in models)
    assert proposed_profiles() == proposed
    assert set(known_profiles()) - set(proposed) == {"a800-qwen3-14b-as-published"}


@pytest.mark.parametrize("name", known_profiles())
def test_a_shipped_profile_is_sound(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert {"servers", "training", "moves", "overhead_s"} <= set(profile.provenance)
    steps = [cost.decode_step_s(8, 0) for _, cost in sorted(profile.servers.items())]
    assert steps == sorted(steps, reverse=True), "more GPUs make a step shorter"
    for degree, cost in profile.servers.items():
        assert cost.tensor_parallel == degree
        assert profile.facts.server_gib(degree, cost.kv_tokens) <= profile.facts.usable_gib
    heads = profile.facts.kv_bytes / (4 * 128 * profile.facts.layers)
    for smaller, larger in pairwise(sorted(profile.servers)):
        factor = 2 if larger <= heads else 1  # from there on key heads are held more than once
        assert profile.servers[larger].kv_tokens > factor * profile.servers[smaller].kv_tokens


def test_a_model_without_room_for_a_cache_is_not_served_by_one_gpu() -> None:
    assert min(load_profile("a100-qwen3-32b").servers) == 2


def test_the_numbers_are_those_of_the_calibration_with_the_overhead_on_top() -> None:
    cost = load_profile("a100-qwen3-14b").servers[8].linear()
    assert cost.step_s == pytest.approx(0.0050345 + 0.004, rel=1e-4)
    assert cost.kv_token_s == pytest.approx(12.96e-9, rel=1e-3)


def test_an_a800_is_less_than_8_percent_slower_than_an_a100() -> None:
    a100, a800 = (with_overhead(load_profile(f"{gpu}-qwen3-14b"), 0.0) for gpu in ("a100", "a800"))
    for degree, cost in a100.servers.items():
        ratio = a800.servers[degree].decode_step_s(64, 0) / cost.decode_step_s(64, 0)
        assert 1.0 <= ratio < 1.08
        assert (ratio > 1.0) == (degree > 1)


def test_a_profile_can_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(load_profile("h100-qwen3-8b").to_json())
    assert load_profile(str(file)) == load_profile("h100-qwen3-8b")


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ProfileError) as error:
        load_profile("b200-qwen3-14b")
    assert "a800-qwen3-14b" in error.value.hint


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{\n")
    with pytest.raises(ProfileError, match=r"broken\.json: line 2"):
        load_profile(str(file))


def test_a_profile_for_another_gpu_is_refused() -> None:
    profile = load_profile("a100-qwen3-14b")
    require_gpu(profile, "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ProfileError, match=r"A100.*H200"):
        require_gpu(profile, "NVIDIA H200")


def test_a_profile_of_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mixture.json"
    dense = load_profile("h100-qwen3-8b")
    file.write_text(replace(dense, model="Qwen3-30B-A3B").to_json())
    with pytest.raises(MixtureRefused, match="Qwen3-30B-A3B"):
        load_profile(str(file))


def test_a_model_is_dense_or_not_by_its_config_and_else_by_its_name(tmp_path: Path) -> None:
    dense = load_profile("a800-qwen3-14b")
    require_law(dense, str(tmp_path))
    require_law(dense, "Qwen/Qwen3-14B")
    with pytest.raises(MixtureRefused):
        require_law(dense, "Qwen/Qwen3-30B-A3B")
    (tmp_path / "config.json").write_text('{"num_experts": 128}')
    with pytest.raises(MixtureRefused, match="128 experts") as refused:
        require_law(dense, str(tmp_path))
    assert "a800-qwen3-30b-a3b" in refused.value.hint


def test_prices_of_a_mixture_are_prices_for_one() -> None:
    require_law(load_profile("a800-qwen3-30b-a3b"), "Qwen/Qwen3-30B-A3B")
