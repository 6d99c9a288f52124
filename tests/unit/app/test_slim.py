"""The controller is light: no GPU stack, no plotting, and help at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ("accelerate", "numpy", "torch", "transformers", "trl", "vllm")
HELP_LIMIT_S = 0.5


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def cpu_s() -> float:
    """Seconds that child processes have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_command_line_imports_nothing_heavy() -> None:
    code = f"import sys, libra_cli.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_help_takes_under_half_a_second() -> None:
    """Of processor time, since other processes want the same cores; the best of five."""
    code = "import sys; from libra_cli.cli.main import main; sys.argv = ['libra', '--help']; main()"
    times: list[float] = []
    while len(times) < 5 and min(times, default=HELP_LIMIT_S) >= HELP_LIMIT_S:
        before = os.times()
        result = python("-c", code)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
        assert result.returncode == 0, result.stderr
        assert "run" in result.stdout
    assert min(times) < HELP_LIMIT_S
