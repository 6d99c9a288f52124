"""The directory of a run is its own, and what is in it is read as it was written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libra_cli.config.errors import StateError
from libra_cli.config.recipe import RunSpec
from libra_cli.runtime.store.run_directory import new_run_dir

WITHOUT_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
KEEPS = r"""
import sys
from pathlib import Path
from libra_cli.config.recipe import Recipe
from libra_cli.runtime.store.run_directory import keep_recipe, recipe_of
recipe = {"nodes": [{"host": "local", "slots": 2}], "model": {"path": "/mod\u00e8les/a"}}
recipe = Recipe.model_validate(recipe)
keep_recipe(recipe, Path(sys.argv[1]))
assert recipe_of(Path(sys.argv[1])) == recipe
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run of a directory that is not there, at a second that lasts."""
    monkeypatch.setattr(time, "strftime", lambda form: "20270101-000000")
    return RunSpec(name="a", directory=str(tmp_path / "new" / "runs"))


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(spec: RunSpec) -> None:
    with new_run_dir(spec) as first, new_run_dir(spec) as second, new_run_dir(spec) as third:
        names = [path.name.removeprefix("a-20270101-000000") for path in (first, second, third)]
        assert names == ["", "-2", "-3"]
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in (first, second, third))


def test_a_directory_goes_again_if_nothing_was_put_into_it(spec: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(StateError), new_run_dir(spec):
        raise StateError("refused")
    assert list(tmp_path.iterdir()) == []
    with new_run_dir(spec) as begun, new_run_dir(spec) as refused:
        (begun / "libra.db").touch()
    assert begun.exists()
    assert not refused.exists()


def test_a_place_that_takes_no_directory_is_told(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "new").symlink_to("nowhere")
    with pytest.raises(StateError, match="cannot be made"), new_run_dir(spec):
        pass


def test_a_recipe_is_kept_in_utf8_whatever_the_locale(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEEPS, str(tmp_path)],
        env={**os.environ, **WITHOUT_UTF8},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
