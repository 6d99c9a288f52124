"""What libra import takes for TRL's keys and defaults, against the classes of the TRL installed."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch", reason="needs the [cpu] extra")
trl = pytest.importorskip("trl", reason="needs the [test] extra")

from libra_cli.config.other_names import trl as tables  # noqa: E402
from libra_cli.config.other_names.rule import Table  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(120),
    # TRL warns about the vLLM it finds; nothing is generated here.
    pytest.mark.filterwarnings("ignore"),
]
KINDS = {"GRPOConfig": tables.GRPO, "RLOOConfig": tables.RLOO, "SFTConfig": tables.SFT}


@pytest.mark.parametrize(("name", "table"), KINDS.items())
def test_defaults_are_those_of_trl(name: str, table: Table) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(getattr(trl, name))}
    theirs = {key: value for key, value in table.defaults.items() if key in fields}
    assert "learning_rate" in theirs
    assert theirs == {key: fields[key] for key in theirs}


@pytest.mark.parametrize(("name", "table"), KINDS.items())
def test_every_key_of_trl_is_translated_or_has_its_reason(name: str, table: Table) -> None:
    keys = {field.name for field in dataclasses.fields(getattr(trl, name))}
    assert keys - table.theirs() == set()
