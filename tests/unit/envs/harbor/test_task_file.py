from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.task_file import read_task

WHOLE = """\
version = "1.0"

[metadata]
difficulty = "easy"
tags = ["x"]

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30

[environment]
build_timeout_sec = 60.0
cpus = 2
memory_mb = 512
storage_mb = 256
allow_internet = false
env = { KEY = "${KEY:-none}" }
"""


def written(directory: Path, task_toml: str) -> Path:
    task = directory / "a-task"
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "task.toml").write_text(task_toml)
    (task / "instruction.md").write_text("Do it.\n")
    (task / "tests/test.sh").write_text("exit 0\n")
    return task


def test_a_whole_task_is_read(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, WHOLE))
    assert (task.name, task.instruction, task.metadata["difficulty"]) == (
        "a-task",
        "Do it.",
        "easy",
    )
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (120, 30, 60)
    assert (task.memory_mb, task.storage_mb, task.wants_internet) == (512, 256, False)
    assert task.env == {"KEY": "${KEY:-none}"}
    assert task.refused == ()
    assert [note.partition(": ")[2] for note in task.notes] == ["cpus does nothing here"]


def test_what_is_not_said_has_harbors_defaults(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, ""))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (None, 600, 600)
    assert (task.memory_mb, task.storage_mb, task.wants_internet) == (2048, 10240, False)


def test_sizes_of_older_tasks_are_read(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, '[environment]\nmemory = "1.5G"\nstorage = "512M"\n'))
    assert (task.memory_mb, task.storage_mb) == (1536, 512)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\n\ntimeout_sec = -1\n", "task.toml:3: agent.timeout_sec: is -1, not a number"),
        ("[verifier]\ntimeout_sec = 'x'\n", "task.toml:2: verifier.timeout_sec: is 'x', not"),
        ("[environment]\nmemory = 'much'\n", "task.toml:2: environment.memory: is 'much', not a"),
        ("[environment]\nmemory_mb = 1.5\n", "task.toml:2: environment.memory_mb: is 1.5, not a"),
        ("[environment]\nenv = { A = 1 }\n", "task.toml:2: environment.env: is {'A': 1}, not"),
        ("agent = 3\n", "task.toml:1: agent: is 3, not a table"),
        ("a = \n", "task.toml: is no TOML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(EnvironmentBroken, match=r"task\.toml") as caught:
        read_task(written(tmp_path, text))
    assert said in str(caught.value)


def test_unknown_keys_are_told_and_refuse_nothing(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, "[agent]\n# time\ntimeout_secs = 3\n"))
    assert task.refused == ()
    (note,) = task.notes
    assert note.endswith("task.toml:3: timeout_secs is not known; did you mean 'timeout_sec'?")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[environment]\ngpus = 1\n", 2, "gpus: a sandbox has no GPU"),
        ("[environment]\nos = 'windows'\n", 2, "os: a sandbox runs Linux"),
        ("[[environment.mcp_servers]]\nname = 'x'\n", 1, "mcp_servers: they are not started"),
        ("[verifier]\nenvironment_mode = 'separate'\n", 2, "environment_mode: tests run in the"),
        ("[environment]\nallowed_hosts = ['a.b']\n", 1, "network_mode: a sandbox has the whole"),
    ],
)
def test_what_would_be_another_task_is_refused(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    (refused,) = read_task(written(tmp_path, text)).refused
    assert refused.where.endswith(("task.toml", f"task.toml:{line}"))
    assert refused.reason.startswith(reason)
    assert refused.hint


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_a_task_without_instruction_or_tests_is_refused(tmp_path: Path, missing: str) -> None:
    directory = written(tmp_path, WHOLE)
    (directory / missing).unlink()
    (refused,) = read_task(directory).refused
    assert (refused.where, refused.reason) == (str(directory / missing), "is missing")


def test_several_containers_are_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, WHOLE)
    (directory / "environment/docker-compose.yaml").write_text("services: {}\n")
    (refused,) = read_task(directory).refused
    assert "several containers" in refused.reason


@pytest.mark.parametrize(
    "text", ["[environment]\nallow_internet = true\n", "[environment]\nnetwork_mode = 'public'\n"]
)
def test_the_internet_is_wanted_where_that_is_written(tmp_path: Path, text: str) -> None:
    assert read_task(written(tmp_path, text)).wants_internet


def test_a_directory_without_a_task_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match=r"task\.toml cannot be read"):
        read_task(tmp_path)
