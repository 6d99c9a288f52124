"""The table of families in ``libra help models``: what was measured, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from libra_cli.core.preflight.families import refused_family
from tests.families import FAMILIES, Family
from tests.families_table import Row, in_page, measured, table

REFUSED = {
    "deepseek_v2": "latent attention",
    "deepseek_v32": "latent attention",
    "falcon_h1": "Mamba",
    "glm4_moe_lite": "latent attention",
}
"""By ``model_type``, families that are refused and of which no small model is played."""


def config_of(family: Family) -> Mapping[str, Any]:
    return family.written(family.text_config())


def test_the_page_has_what_was_measured():
    page = table({family.name: config_of(family) for family in FAMILIES})
    assert in_page() == page, "python -m tests.research.families --write"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_comes_through_all_of_it_or_is_refused_before_anything_starts(family: Family):
    refused = refused_family(config_of(family))
    row = measured().get(family.name, Row(family.name))
    assert row.good == (refused is None), row
    if refused is None:
        assert row.dtype == family.dtype, "it was measured in another"
    else:
        assert refused.why.partition(":")[0] == family.model_type
        assert refused.instead.startswith("model.path: ")


@pytest.mark.parametrize(("kind", "why"), REFUSED.items())
def test_what_no_cpu_kernel_serves_is_refused(kind: str, why: str):
    refused = refused_family({"model_type": kind})
    assert refused is not None
    assert why in refused.why


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"gap": 2e-3}, False),
        ({"gap": 2e-3, "dtype": "bfloat16"}, True),
        ({"exported": None}, False),
        ({"proved": False}, False),
        ({"problem": "it died"}, False),
    ],
)
def test_a_family_is_good_if_it_is_proved_with_small_gaps(change: dict[str, Any], good: bool):
    row: dict[str, Any] = {"family": "f", "gap": 1e-7, "exported": 1e-7, "proved": True}
    assert Row(**(row | change)).good == good
