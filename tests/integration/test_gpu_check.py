"""``make gpu-check``, rehearsed on the CPU: every check that one device allows, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs the [cpu] extra")
pytest.importorskip("vllm", reason="needs the [cpu] extra")

from tests.gpu.check import check_of

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["head", "attention", "checksums"])
def test_a_check_of_kernels_passes_on_the_cpu(name: str, tmp_path: Path):
    assert check_of(name, "cpu", tmp_path, gpus=0)["ok"]


@pytest.mark.nightly
def test_the_rehearsal_makes_every_check_but_those_of_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "tests.gpu.check", "--rehearse"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    verdicts = {name: result["ok"] for name, result in found["checks"].items()}
    assert verdicts.pop("all_reduce") is verdicts.pop("run") is None
    assert set(verdicts.values()) == {True}, found
    assert found["machine"]["torch"]
