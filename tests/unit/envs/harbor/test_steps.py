"""Tasks in steps: one sandbox, an instruction and tests for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.environment import Harbor
from libra_cli.envs.harbor.task_file import read_task
from libra_cli.envs.harbor.verifier import VerifierResult, rolled_up
from libra_cli.envs.protocol import ToolCall
from tests.sandboxes import needs_sandboxes

SETTINGS = """\
[verifier]
timeout_sec = 30
env = { WORD = "first" }

[[steps]]
name = "one"
min_reward = 0.5

[steps.agent]
timeout_sec = 7

[[steps]]
name = "two"

[steps.verifier]
env = { WORD = "second" }
"""
TEST = "#!/bin/bash\ngrep -c $WORD /app/state > /logs/verifier/reward.txt\n"


def written(directory: Path, settings: str = SETTINGS) -> Path:
    task = directory / "tasks/steps"
    for name, text in {
        "task.toml": settings,
        "environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN touch state\n",
        "tests/test.sh": TEST,
        "steps/one/instruction.md": "Write first.",
        "steps/one/solution/solve.sh": "#!/bin/bash\necho first > state\n",
        "steps/two/instruction.md": "Write second.",
        "steps/two/solution/solve.sh": "#!/bin/bash\necho second >> state\n",
        "steps/two/tests/extra": "of the second step\n",
        "steps/two/workdir/setup.sh": "echo 'set up' > ready\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


def test_steps_are_read_with_what_the_task_says_for_all(tmp_path: Path) -> None:
    task = read_task(written(tmp_path))
    one, two = task.steps
    assert (one.instruction, one.agent_timeout_s, one.verifier_timeout_s) == ("Write first.", 7, 30)
    assert (one.min_reward, one.verifier_env) == ({"reward": 0.5}, {"WORD": "first"})
    assert (two.instruction, two.agent_timeout_s, two.min_reward) == ("Write second.", None, {})
    assert two.verifier_env == {"WORD": "second"}
    assert (task.refused, task.only_final) == ((), False)


def test_a_step_that_is_not_there_is_told(tmp_path: Path) -> None:
    settings = SETTINGS.replace('"two"', '"three"')
    with pytest.raises(EnvironmentBroken, match="'three' is no directory in steps/"):
        read_task(written(tmp_path, settings))


def test_a_step_without_instruction_or_tests_is_refused(tmp_path: Path) -> None:
    task = written(tmp_path)
    (task / "steps/one/instruction.md").unlink()
    (task / "tests/test.sh").unlink()
    missing = [Path(one.where).relative_to(task) for one in read_task(task).refused]
    assert missing == [
        Path("steps/one/tests/test.sh"),
        Path("steps/one/instruction.md"),
        Path("steps/two/tests/test.sh"),
    ]


def with_keys(step: str = "", **sections: str) -> str:
    """Return the settings with more keys of the second step, in it and in its sections."""
    added = "".join(f"[steps.{name}]\n{text}\n" for name, text in sections.items())
    return SETTINGS.partition("\n[steps.verifier]")[0] + f"{step}\n{added}"


@pytest.mark.parametrize(
    ("settings", "line", "reason"),
    [
        (with_keys("healthcheck = { command = 'true' }"), 14, "healthcheck: nothing is started"),
        (with_keys(healthcheck="command = 'true'"), 15, "healthcheck: nothing is started"),
        (with_keys(verifier="environment_mode = 'separate'"), 16, "environment_mode: tests run in"),
        (with_keys(verifier="environment = { cpus = 1 }"), 16, "environment: tests run in"),
        (with_keys(verifier="collect = [{ command = 'x' }]"), 16, "collect: nothing is run before"),
        (
            with_keys(agent="network_mode = 'allowlist'"),
            16,
            "network_mode: a sandbox has the whole",
        ),
        (with_keys("agent.allowed_hosts = ['a']"), 14, "network_mode: a sandbox has the whole"),
    ],
)
def test_what_a_step_cannot_have_is_refused_with_its_line(
    tmp_path: Path, settings: str, line: int, reason: str
) -> None:
    (refused,) = read_task(written(tmp_path, settings)).refused
    assert refused.where.endswith(f"task.toml:{line}"), settings
    assert refused.reason.startswith(reason)


def test_keys_of_steps_that_do_nothing_or_are_not_known_are_told(tmp_path: Path) -> None:
    settings = with_keys("artifacts = ['/x']\nminreward = 1", agent="user = 'root'\ntime = 1")
    task = read_task(written(tmp_path, settings))
    assert task.refused == ()
    assert [note.rpartition("task.toml:")[2] for note in task.notes] == [
        "14: artifacts does nothing here",
        "15: minreward is not known; did you mean 'min_reward'?",
        "17: user does nothing here",
        "18: time is not known",
    ]


def test_the_internet_that_a_step_wants_is_the_tasks(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, with_keys(verifier="network_mode = 'public'")))
    assert (task.wants_internet, task.steps[0].wants_internet) == (True, False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            with_keys(agent="timeout_sec = 'x'"),
            "16: steps[1].agent.timeout_sec: is 'x', not a number",
        ),
        (with_keys(verifier="timeout_sec = 0"), "16: steps[1].verifier.timeout_sec: is 0, not"),
        (with_keys(verifier="env = { A = 1 }"), "16: steps[1].verifier.env: is {'A': 1}, not"),
        (with_keys("agent = 3"), "14: steps[1].agent: is 3, not a table"),
        (with_keys("min_reward = 'all'"), "14: steps[1].min_reward: is 'all', neither a number"),
        (
            with_keys("min_reward = { a = true }"),
            "14: steps[1].min_reward: is {'a': True}, neither",
        ),
        (SETTINGS.replace('"two"', '"one"'), "13: steps[1].name: 'one' is that of another step"),
        (SETTINGS.replace('"two"', '"../steps"'), "13: steps[1].name: '../steps' is no directory"),
        (
            "multi_step_reward_strategy = 'best'",
            "1: multi_step_reward_strategy: is 'best', neither",
        ),
    ],
)
def test_what_is_wrong_in_a_step_is_told_with_its_line(
    tmp_path: Path, settings: str, said: str
) -> None:
    with pytest.raises(EnvironmentBroken, match=r"task\.toml") as caught:
        read_task(written(tmp_path, settings))
    assert f"task.toml:{said}" in str(caught.value)


@pytest.mark.parametrize(
    ("only_final", "rewards"),
    [(False, {"reward": 0.5, "style": 1.0}), (True, {"reward": 1.0})],
)
def test_results_of_steps_become_one(only_final: bool, rewards: dict[str, float]) -> None:
    results = [
        VerifierResult({"reward": 0.0, "style": 2.0}, "a"),
        VerifierResult({"reward": 1.0}, "b"),
    ]
    assert rolled_up(results, only_final=only_final).rewards == rewards


def test_a_step_whose_tests_wrote_nothing_counts_as_zero() -> None:
    results = [VerifierResult({"reward": 1.0}), VerifierResult()]
    assert rolled_up(results, only_final=False).rewards == {"reward": 0.5}
    assert rolled_up([], only_final=False).rewards == {}


Begin = Callable[..., Harbor]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    opened: list[Harbor] = []

    def begun(settings: str = SETTINGS) -> Harbor:
        directory = written(tmp_path / str(len(opened)), settings).parent
        environment = Harbor(str(directory), base="host", cache=str(tmp_path / "cache"))
        opened.append(environment)
        (message,) = environment.reset({"task": "steps"}, 0)
        assert message["content"].startswith("Write first.")
        return environment

    yield begun
    for one in opened:
        one.close()


def bash(environment: Harbor, command: str) -> str:
    return environment.step(ToolCall("bash", {"command": command})).rstrip("\n")


@needs_sandboxes
def test_steps_are_played_one_after_the_other_in_one_sandbox(begin: Begin) -> None:
    environment = begin()
    assert bash(environment, "ls; echo first > state") == "state"
    told = environment.reply("Done.")
    assert told is not None
    (message,) = told
    assert message["content"].startswith("Write second.")
    assert bash(environment, "cat state ready; ls -d /tests setup.sh 2> /dev/null") == (
        "first\nset up\n[exit code 2]"
    )
    assert environment.reply("Done again.") is None
    assert environment.score("Done again.") == 0.5


@needs_sandboxes
def test_a_step_whose_files_the_model_keeps_out_is_tested_as_it_is(begin: Begin) -> None:
    environment = begin()
    bash(environment, "echo first > state; chmod 555 .")
    assert environment.reply("Done.") is None
    assert environment.score("Done.") == 0.5


@needs_sandboxes
def test_a_step_whose_setup_the_model_makes_fail_counts_as_zero(begin: Begin) -> None:
    environment = begin()
    bash(environment, "echo first second > state; mkdir ready")
    assert environment.reply("Done.") is None
    assert environment.score("Done.") == 0.5, "its tests would have given it 1"
    assert "setup.sh: " in environment.said
    assert environment.metrics()["set_up"] == 0.0


@needs_sandboxes
def test_a_first_step_whose_setup_fails_is_the_environments_fault(tmp_path: Path) -> None:
    task = written(tmp_path)
    (task / "steps/one/workdir").mkdir()
    (task / "steps/one/workdir/setup.sh").write_text("echo no; exit 3\n")
    environment = Harbor(str(task.parent), base="host", cache=str(tmp_path / "cache"))
    with pytest.raises(EnvironmentBroken, match=r"one/workdir/setup\.sh: no"):
        environment.reset({"task": "steps"}, 0)


@needs_sandboxes
def test_solutions_of_all_steps_solve_the_task(begin: Begin) -> None:
    environment = begin()
    assert environment.solve() == ""
    assert environment.reply("") is not None
    assert environment.solve() == ""
    assert environment.reply("") is None
    assert environment.score("") == 1.0


@needs_sandboxes
def test_too_little_in_one_step_ends_the_task(begin: Begin) -> None:
    environment = begin()
    assert environment.reply("I give up.") is None
    assert environment.score("I give up.") == 0.0
    assert environment.metrics() == {"set_up": 1.0, "verified": 1.0}


@needs_sandboxes
def test_the_last_step_alone_counts_where_the_task_says_so(begin: Begin) -> None:
    settings = 'multi_step_reward_strategy = "final"\n' + SETTINGS.replace("0.5", "0.0")
    environment = begin(settings)
    assert environment.reply("") is not None
    bash(environment, "echo second > state")
    assert environment.score("") == 1.0


@needs_sandboxes
def test_a_step_whose_tests_write_nothing_is_the_last(begin: Begin) -> None:
    environment = begin(SETTINGS.replace("min_reward = 0.5", ""))
    bash(environment, "rm state")  # grep then says nothing of how many lines there are
    assert environment.reply("Done.") is None
    assert environment.score("Done.") == 0.0
    assert environment.metrics() == {"set_up": 1.0, "verified": 0.0}
