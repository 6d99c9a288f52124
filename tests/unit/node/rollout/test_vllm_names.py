"""The vLLM that is installed has all that libra touches inside it; its sources are read."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import vllm_names

pytestmark = pytest.mark.vllm


def installed() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs the [cpu] extra")
    return Path(spec.origin).parent


def test_the_installed_vllm_has_what_is_used_of_it() -> None:
    imports = set(vllm_names.imported())
    assert ("vllm.v1.engine.core_client", "InprocClient") in imports
    assert len(imports) > 20
    assert list(vllm_names.missing(installed())) == []


def test_what_is_gone_or_called_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        vllm_names.MEMBERS,
        "v1/engine/core.py:EngineCore",
        {"pause_scheduler": ("mode", "gently"), "hum": ()},
    )
    monkeypatch.setitem(vllm_names.MODULE_NAMES, "envs.py", ("VLLM_NONE",))
    known = set(vllm_names.imported())
    monkeypatch.setattr(vllm_names, "imported", lambda: known | {("vllm.v1.gone", "Thing")})
    assert set(vllm_names.missing(installed())) == {
        "v1/engine/core.py:EngineCore.pause_scheduler(gently)",
        "v1/engine/core.py:EngineCore.hum",
        "envs.py: VLLM_NONE",
        "vllm.v1.gone.Thing",
    }
