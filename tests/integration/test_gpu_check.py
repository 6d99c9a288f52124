"""``make gpu-check``, rehearsed on the CPU: every check, small, those of several GPUs too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs the [cpu] extra")
pytest.importorskip("vllm", reason="needs the [cpu] extra")

from tests.gpu import kernels
from tests.gpu.expected import BY_NAME, CHECKS
from tests.gpu.model import REHEARSED
from tests.gpu.place import Place

pytestmark = [pytest.mark.integration, pytest.mark.vllm]
ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compute_on_the_cpu_what_they_should(tmp_path: Path):
    measured = kernels.kernels(Place(tmp_path, REHEARSED, gpus=0))
    failed, _ = BY_NAME["kernels"].problems(measured, "cpu")
    assert not failed


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_rehearsal_makes_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "tests.gpu.check", "--rehearse"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "gpu-check/checks.jsonl").read_text().splitlines()
    assert [json.loads(line)["check"] for line in lines] == [check.name for check in CHECKS]
    assert not (tmp_path / "gpu-check/work").exists()
    report = (tmp_path / "gpu-check/report.txt").read_text()
    assert all(check.name in report for check in CHECKS)
