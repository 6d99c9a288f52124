"""``libra quickstart`` in an empty directory, as after ``pip install``: no recipe, no checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from libra_cli.api import load_run
from tests.live import LIBRA, START_S, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]
require("vllm")

STEPS = 2


def test_a_first_run_says_where_it_is_and_what_to_type_next(tmp_path: Path, models: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    (home / ".libra").mkdir(parents=True)
    (home / ".libra/models").symlink_to(models)
    here.mkdir()
    done = subprocess.run(
        [*LIBRA, "quickstart", "--cpu", "--steps", str(STEPS)],
        cwd=here,
        env={**os.environ, "HOME": str(home), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=2 * START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = here.glob("runs/quickstart-*")
    assert f"run directory: {run_dir}" in done.stdout
    assert f"libra show runs/{run_dir.name} --best" in done.stdout
    assert len(load_run(run_dir).steps) == STEPS
    assert [path.name for path in here.iterdir()] == ["runs"]
