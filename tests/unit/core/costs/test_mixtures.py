"""Mixtures of experts are told from dense models, and refused where a price is wanted."""

from __future__ import annotations

import pytest

from libra_cli.core.costs.mixtures import (
    MixtureRefused,
    experts_of,
    is_named_mixture,
    refuse_mixture,
)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 128}, 128),
        ({"num_local_experts": 8}, 8),
        ({"n_routed_experts": 256}, 256),
        ({"text_config": {"num_experts": 64}}, 64),
        ({"num_experts": 1, "hidden_size": 64}, 0),
        ({"num_experts": None}, 0),
        ({"hidden_size": 64}, 0),
    ],
)
def test_config_json_says_how_many_experts_there_are(
    config: dict[str, object], experts: int
) -> None:
    assert experts_of(config) == experts


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B-Instruct-2507", "Qwen3.5-35B-A3B", "Mixtral-8x7B-v0.1", "OLMoE-1B-7B"]
)
def test_names_of_mixtures_are_known(name: str) -> None:
    assert is_named_mixture(name)


@pytest.mark.parametrize("name", ["Qwen3-14B", "Llama-3.1-8B", "built-arithmetic", "gemma-3-4b-it"])
def test_names_of_dense_models_are_none(name: str) -> None:
    assert not is_named_mixture(name)


def test_the_refusal_says_why_and_what_to_do() -> None:
    with pytest.raises(MixtureRefused, match=r"128 experts in its config\.json") as refused:
        refuse_mixture("/models/mine", {"num_experts": 128})
    assert "kind: fixed" in refused.value.hint
    with pytest.raises(MixtureRefused, match="by its name"):
        refuse_mixture("/models/Qwen3-30B-A3B/", {})


def test_a_config_without_experts_counts_more_than_the_name() -> None:
    refuse_mixture("dense-student-of-A3B", {"hidden_size": 64})
