"""Tiny models with the hub's names, from the trainer over versions and exports to real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs the [cpu] extra")
pytest.importorskip("vllm", reason="needs the [cpu] extra")

from tests.families_table import measured

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(3600)]


def rows_of(families: list[str], base: Path) -> list[dict[str, Any]]:
    """Of a process of its own: vLLM reads its environment when it is imported."""
    out = base / "rows.json"
    command = [sys.executable, "-m", "tests.research.families", *families, "--json", str(out)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def test_experts_and_fused_layers_are_published_proved_and_exported(tmp_path: Path):
    rows = rows_of(["Qwen3-MoE", "Phi 4"], tmp_path)
    assert len(rows) == 2
    assert all(row["good"] for row in rows), rows


@pytest.mark.nightly
def test_every_family_that_the_table_says_is_served(tmp_path: Path):
    rows = rows_of([row.family for row in measured().values() if row.good], tmp_path)
    bad = [row for row in rows if not row["good"]]
    assert not bad, bad
