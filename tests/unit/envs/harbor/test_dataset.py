from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.dataset import TaskFilter, Unplayable, read_tasks


def task(directory: Path, settings: str = "", dockerfile: str = "FROM x\n") -> Path:
    (directory / "tests").mkdir(parents=True)
    (directory / "environment").mkdir()
    (directory / "environment/Dockerfile").write_text(dockerfile)
    (directory / "task.toml").write_text(settings)
    (directory / "instruction.md").write_text("Do it.")
    (directory / "tests/test.sh").write_text("exit 0\n")
    return directory


def names(
    directory: Path,
    chosen: TaskFilter | None = None,
    *,
    network: bool = False,
    unplayable: Unplayable = "error",
) -> list[str]:
    found = read_tasks(directory, chosen or TaskFilter(), network=network, unplayable=unplayable)
    return list(found.playable)


@pytest.mark.parametrize("place", ["", "one/", "deeper/one/"])
def test_tasks_are_found_in_a_directory_and_one_level_deeper(tmp_path: Path, place: str) -> None:
    if not place:
        task(tmp_path / "b")
        assert names(tmp_path / "b") == ["b"]
        return
    above = (tmp_path / place).parent
    task(above / "b")
    task(above / "a")
    assert names(tmp_path) == ["a", "b"]


def test_tasks_are_chosen_by_name_difficulty_and_category(tmp_path: Path) -> None:
    task(tmp_path / "a", '[metadata]\ndifficulty = "easy"\ncategory = "git"\n')
    task(tmp_path / "b", '[metadata]\ndifficulty = "hard"\ncategory = "git"\n')
    assert names(tmp_path, TaskFilter(difficulty=("easy",))) == ["a"]
    assert names(tmp_path, TaskFilter(category=("git", "x"))) == ["a", "b"]
    assert names(tmp_path, TaskFilter(names=("b",), category=("git",))) == ["b"]
    with pytest.raises(EnvironmentBroken, match="none of 2 tasks is meant by difficulty soft"):
        names(tmp_path, TaskFilter(difficulty=("soft",)))


def test_a_directory_without_tasks_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match="has no task") as caught:
        names(tmp_path)
    assert "libra tasks make" in caught.value.hint


def test_what_cannot_be_played_is_told_or_left_out(tmp_path: Path) -> None:
    task(tmp_path / "a", "[environment]\ngpus = 1\n")
    task(tmp_path / "b", dockerfile="FROM x\nENTRYPOINT y\n")
    task(tmp_path / "c")
    with pytest.raises(EnvironmentBroken) as caught:
        names(tmp_path)
    assert str(caught.value).startswith("2 tasks cannot be played:\n")
    assert "a/task.toml:2: gpus: a sandbox has no GPU" in str(caught.value)
    assert "b/environment/Dockerfile:2: ENTRYPOINT y: no program is started" in str(caught.value)
    assert "unplayable: skip" in caught.value.hint
    found = read_tasks(tmp_path, TaskFilter(), network=False, unplayable="skip")
    assert (list(found.playable), list(found.refused)) == (["c"], ["a", "b"])
    with pytest.raises(EnvironmentBroken, match="gpus"):
        found.named("a")


def test_a_data_set_of_which_nothing_can_be_played_is_an_error(tmp_path: Path) -> None:
    task(tmp_path / "a", "[environment]\ngpus = 1\n")
    with pytest.raises(EnvironmentBroken, match="1 tasks cannot be played"):
        names(tmp_path, unplayable="skip")


def test_the_internet_is_there_only_where_the_sandbox_has_it(tmp_path: Path) -> None:
    task(tmp_path / "a", "[environment]\nallow_internet = true\n")
    with pytest.raises(EnvironmentBroken, match="wants the internet"):
        names(tmp_path)
    assert names(tmp_path, network=True) == ["a"]


def test_a_task_that_is_not_there_is_told_with_one_that_is(tmp_path: Path) -> None:
    task(tmp_path / "sort-lines")
    found = read_tasks(tmp_path, TaskFilter(), network=False, unplayable="error")
    assert found.named("sort-lines").name == "sort-lines"
    with pytest.raises(EnvironmentBroken, match="did you mean 'sort-lines'"):
        found.named("sort-line")
    with pytest.raises(EnvironmentBroken, match="no task None"):
        found.named(None)
