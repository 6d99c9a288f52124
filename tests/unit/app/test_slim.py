"""The controller is light: no GPU stack, no plotting, and help at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ("accelerate", "numpy", "torch", "transformers", "trl", "vllm")
MOST_TIMES = 2.0
"""Of what help costs a command line that only imports typer and rich; 1.6 was measured."""
BARE = """
import sys
import typer

app = typer.Typer(help="Does something.")
app.command("run")(lambda: None)
app.command("stop")(lambda: None)
sys.argv = ["bare", "--help"]
app()
"""


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


def test_help_costs_little_more_than_what_draws_it() -> None:
    """In processor time beside a command line of typer's alone: no machine's speed is in it."""
    code = "import sys; from libra_cli.cli.main import main; sys.argv = ['libra', '--help']; main()"
    ours: list[float] = []
    bare: list[float] = []
    while len(ours) < 8 and (not ours or min(ours) > MOST_TIMES * min(bare)):
        ours.append(help_cpu_s(code))
        bare.append(help_cpu_s(BARE))
    assert min(ours) <= MOST_TIMES * min(bare)


def help_cpu_s(code: str) -> float:
    """Processor seconds of a command line that shows its help."""
    before = cpu_s()
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "run" in result.stdout
    return cpu_s() - before
