"""Adapters of an engine, where vLLM refuses one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_cli.node.rollout.turn import TurnRefused
from tests.live import require

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
require("vllm")


class Refusing:
    """An engine's core that takes no adapter."""

    def add_lora(self, request: Any) -> None:
        raise ValueError("rank 64 is too large")


def test_of_an_adapter_that_vllm_refuses_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from libra_cli.node.rollout.engine import VllmEngine
    from libra_cli.node.rollout.served_adapters import ServedAdapters

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._core, engine._adapters = Refusing(), ServedAdapters()
    with pytest.raises(ValueError, match="too large"):
        engine.add_adapter("mine", "{}", b"")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TurnRefused, match="no adapter mine"):
        engine._adapters.request("mine")
