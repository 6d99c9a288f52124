"""Whole episodes of tasks, each in a sandbox of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.agents.enclosed import EnclosedJob
from libra_cli.envs.harbor.builder import UNUSED_S
from libra_cli.envs.harbor.environment import Harbor
from libra_cli.envs.protocol import Finished, ToolCall, ToolFailed
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from libra_cli.envs.sandbox.spec import SandboxLimits, SandboxSpec
from tests.sandboxes import needs_sandboxes

pytestmark = needs_sandboxes

DOCKERFILE = "FROM python:3.12\nWORKDIR /app\nCOPY notes.txt .\n"
TEST = "[ $(cat /app/done.txt) = $EXPECTED ] && echo 1 > /logs/verifier/reward.txt || exit 1\n"
SETTINGS = '[verifier]\nenv = { EXPECTED = "${WORD:-yes}" }\n'

Begin = Callable[..., Harbor]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Write a task and begin an episode of it."""
    opened: list[Harbor] = []

    def begun(
        dockerfile: str = DOCKERFILE, test: str = TEST, settings: str = SETTINGS, **args: Any
    ) -> Harbor:
        task = tmp_path / f"tasks{len(opened)}/one"
        for name, text in {
            "task.toml": settings,
            "instruction.md": "Write `yes` to done.txt.",
            "environment/Dockerfile": dockerfile,
            "environment/notes.txt": "notes\n",
            "environment/bin/tool": "#!/bin/sh\necho tool\n",
            "tests/test.sh": f"#!/bin/bash\n{test}",
            "solution/solve.sh": "#!/bin/bash\necho ${SOLVED:-yes} > done.txt\n",
        }.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
        (task / "environment/bin/tool").chmod(0o755)
        given = {"base": "host", "cache": str(tmp_path / "cache"), **args}
        opened.append(environment := Harbor(str(task.parent), **given))
        environment.reset(environment.task(0, 0), 0)
        return environment

    yield begun
    for one in opened:
        one.close()


def bash(environment: Harbor, command: str) -> str:
    return environment.step(ToolCall("bash", {"command": command})).rstrip("\n")


def edit(environment: Harbor, **arguments: str) -> str:
    return environment.step(ToolCall("editor", arguments))


def test_an_episode_is_scored_by_tests_that_it_has_not_seen(begin: Begin) -> None:
    environment = begin()
    assert bash(environment, "pwd; cat notes.txt") == "/app\nnotes"
    seen = bash(environment, "ls -d /tests/* /solution /logs/verifier/*")
    assert "test.sh" not in seen
    assert "[exit code 2]" in seen
    assert bash(environment, "cd /; WORD=yes") == "(no output)"
    assert bash(environment, "pwd; echo $WORD > /app/done.txt") == "/"
    assert environment.score("I am done.") == 1.0
    assert environment.metrics() == {"verified": 1.0}


def test_the_solution_is_rewarded_and_nothing_is_not(begin: Begin) -> None:
    environment = begin()
    assert environment.solve() == ""
    assert environment.score("") == 1.0
    assert begin().score("") == 0.0


def test_the_task_is_what_the_model_reads_first(begin: Begin, tmp_path: Path) -> None:
    begin()
    environment = Harbor(str(tmp_path / "tasks0"), base="host", cache=str(tmp_path / "cache"))
    (message,) = environment.reset({"task": "one"}, 0)
    environment.close()
    assert message["content"].startswith("Write `yes` to done.txt.\n\nYou work in a shell")
    assert "/app" in message["content"]


def test_files_are_edited_from_where_the_task_begins(begin: Begin) -> None:
    environment = begin()
    assert [tool["function"]["name"] for tool in environment.tools] == ["bash", "editor"]
    assert edit(environment, command="view", path="notes.txt") == "     1  notes"
    edit(environment, command="create", path="/app/done.txt", text="no\n")
    edit(environment, command="str_replace", path="done.txt", old="no", new="yes")
    with pytest.raises(ToolFailed, match="No such file"):
        edit(environment, command="view", path="nothing.txt")
    assert environment.score("") == 1.0


LATER = "(sleep 0.2; echo yes > /app/done.txt) > /dev/null 2>&1 &"


@pytest.mark.parametrize(("keep_processes", "reward"), [(False, 0.0), (True, 1.0)])
def test_what_was_left_running_ends_before_the_tests(
    begin: Begin, keep_processes: bool, reward: float
) -> None:
    environment = begin(test=f"sleep 1\n{TEST}", keep_processes=keep_processes)
    bash(environment, LATER)
    assert environment.score("") == reward


def test_a_command_that_hangs_costs_its_time_and_not_the_shell(begin: Begin) -> None:
    sandbox = Sandboxes(SandboxSpec(limits=SandboxLimits(time_s=0.3)))
    environment = begin(sandbox=sandbox)
    assert "its time was over" in bash(environment, "A=1; sleep 60")
    assert bash(environment, "echo $A") == "1"


def test_commands_together_take_no_longer_than_the_task_allows(begin: Begin) -> None:
    environment = begin(settings=f"{SETTINGS}[agent]\ntimeout_sec = 0.4\n")
    assert "its time was over" in bash(environment, "sleep 60")
    with pytest.raises(Finished, match="time for this task is over"):
        bash(environment, "echo more")
    assert environment.score("") == 0.0


@pytest.mark.parametrize(
    ("test", "reward", "metrics"),
    [
        ("echo '{\"reward\": 0.25}' > $L.json", 0.25, {"verified": 1.0}),
        ("echo 0.5 > $L.txt", 0.5, {"verified": 1.0}),
        (
            'echo \'{"reward": 0.5, "style": 2}\' > $L.json',
            0.5,
            {"verified": 1.0, "reward": 0.5, "style": 2.0},
        ),
        ("echo '{\"style\": 0.75}' > $L.json", 0.75, {"verified": 1.0}),
        ("echo much > $L.txt", 0.0, {"verified": 0.0}),
        ("echo nan > $L.txt", 0.0, {"verified": 0.0}),
        ("echo '{' > $L.json", 0.0, {"verified": 0.0}),
        ("printf '[%.0s' $(seq 100000) > $L.json", 0.0, {"verified": 0.0}),
        ("printf '9%.0s' $(seq 400) > $L.json", 0.0, {"verified": 0.0}),
        ("true", 0.0, {"verified": 0.0}),
    ],
)
def test_rewards_are_read_from_either_file(
    begin: Begin, test: str, reward: float, metrics: dict[str, float]
) -> None:
    environment = begin(test=f"L=/logs/verifier/reward\n{test}\n")
    assert environment.score("") == reward
    assert environment.metrics() == metrics


def test_files_with_two_names_are_copied_by_both(begin: Begin, tmp_path: Path) -> None:
    environment = begin(
        test="cd /tests && cmp test.sh twin && echo 1 > /logs/verifier/reward.txt\n"
    )
    tests = tmp_path / "tasks0/one/tests"
    os.link(tests / "test.sh", tests / "twin")
    assert environment.score("") == 1.0


def test_of_several_rewards_one_is_named(begin: Begin) -> None:
    test = 'echo \'{"speed": 3, "style": 2}\' > /logs/verifier/reward.json\n'
    test += "echo 1 > /logs/verifier/reward.txt\n"  # the other file goes before it
    assert begin(test=test, reward="style").score("") == 2.0
    with pytest.raises(EnvironmentBroken, match="speed, style, and none is 'reward'"):
        begin(test=test).score("")


def test_tests_without_an_end_give_nothing_and_are_told(begin: Begin) -> None:
    environment = begin(test="echo so far\nsleep 60\n", settings="[verifier]\ntimeout_sec = 0.3\n")
    assert environment.score("") == 0.0
    assert environment.said == "so far\n(no end in 0.3 s)"


def test_a_reward_that_the_agent_wrote_does_not_count(begin: Begin) -> None:
    environment = begin()
    bash(environment, "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt")
    bash(environment, "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh")
    assert environment.score("") == 0.0


@pytest.mark.parametrize("kept", ["verifier", "verifier/deep", ""])
def test_a_reward_that_the_agent_wrote_and_locked_does_not_count(begin: Begin, kept: str) -> None:
    forged = "touch deep/x; echo '{\"reward\": 1}' > reward.json"
    lock = f"mkdir -p /logs/verifier/deep; (cd /logs/verifier; {forged}); chmod 555 /logs/{kept}"
    environment = begin()
    bash(environment, lock)
    assert environment.score("") == 0.0
    honest = begin()
    bash(honest, f"{lock}; echo yes > done.txt")
    assert honest.score("") == 1.0, "the tests have been run"


def test_a_locked_place_of_the_tests_is_no_reason_to_play_again(begin: Begin) -> None:
    environment = begin()
    bash(environment, "mkdir /tests; touch /tests/test.sh; chmod 555 /tests; echo yes > done.txt")
    assert environment.score("") == 1.0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rm -rf /logs; echo > /logs", "/tests and /logs/verifier cannot be emptied: "),
        ("cat /dev/zero > full", "files cannot be copied to /tests: "),
    ],
)
def test_an_agent_that_keeps_the_tests_out_has_no_reward(
    begin: Begin, command: str, said: str
) -> None:
    environment = begin(sandbox=Sandboxes(SandboxSpec(limits=SandboxLimits(disk_mb=4))))
    bash(environment, f"echo yes > done.txt; {command}")
    assert environment.score("") == 0.0
    assert environment.metrics() == {"verified": 0.0}
    assert environment.said.startswith(said)


def test_variables_come_from_the_recipe_or_have_a_default(begin: Begin) -> None:
    environment = begin(variables={"WORD": "other"})
    environment.solve()
    assert environment.score("") == 0.0
    wanting = begin(settings='[solution]\nenv = { SOLVED = "${MISSING}" }\n')
    with pytest.raises(EnvironmentBroken, match=r"SOLVED wants \$\{MISSING\}, which nothing gives"):
        wanting.solve()


def test_an_agent_works_in_the_task_and_is_scored_by_its_tests(begin: Begin) -> None:
    script = 'test -f notes.txt && echo "$WORD" > done.txt'
    job = EnclosedJob(["sh", "-c", script], {"WORD": "yes"}, [], "{}", 9, "key", "model", 30.0)
    environment = begin()
    assert job.play(environment.agent_place()).code == 0
    assert environment.score("") == 1.0


def test_an_agent_has_the_time_of_the_task(begin: Begin) -> None:
    environment = begin(settings=f"{SETTINGS}[agent]\ntimeout_sec = 0.5\n")
    job = EnclosedJob(["sleep", "60"], {}, [], "{}", 9, "key", "model", 30.0)
    assert job.play(environment.agent_place()).code == 0
    assert environment.score("") == 0.0


def test_an_image_is_made_as_its_dockerfile_says(begin: Begin) -> None:
    environment = begin(
        "FROM python:3.12\nENV WORD='two words'\nWORKDIR /work/here\nCOPY bin/ /opt/bin/\n"
        "COPY notes.txt copy.txt\nCOPY --chmod=600 notes.txt bin /opt/\n"
        "COPY <<END /etc/made\n$WORD\nEND\nRUN echo ran > ran.txt && mkdir -p /srv/x\n"
    )
    assert bash(environment, "pwd; cat copy.txt ran.txt /etc/made") == (
        "/work/here\nnotes\nran\ntwo words"
    )
    assert bash(environment, "/opt/bin/tool; ls -d /srv/x; stat -c %a /opt/notes.txt") == (
        "tool\n/srv/x\n600"
    )


def test_an_image_is_made_once(begin: Begin, tmp_path: Path) -> None:
    dockerfile = f"{DOCKERFILE}RUN date +%s%N > stamp\n"
    stamps = {bash(begin(dockerfile), "cat stamp") for _ in range(2)}
    assert len(stamps) == 1
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 1
    stamps.add(bash(begin(f"{dockerfile}RUN true\n"), "cat stamp"))
    assert len(stamps) == 2


def test_what_a_killed_process_had_made_of_an_image_goes(begin: Begin, tmp_path: Path) -> None:
    begin()
    (image,) = (tmp_path / "cache").glob("*.tar")
    image.unlink()
    other = tmp_path / "cache" / "0.tar"
    left = [Path(f"{one}.unfinished-left") for one in (image, other)]
    for one in left:
        one.mkdir()
        (one / one.name).write_text("half of it")
    begin()
    assert [one.exists() for one in left] == [False, True]  # the other's may be being made
    image.unlink()
    os.utime(left[1], (0, 0))
    begin()
    assert not left[1].exists()


def test_an_image_that_nobody_has_begun_with_for_long_goes_when_another_is_made(
    begin: Begin, tmp_path: Path
) -> None:
    long_ago = time.time() - 2 * UNUSED_S
    for line in ("RUN echo 1 > /first", "RUN echo 1 > /second"):
        begin(f"FROM a\n{line}\n")
        for kept in (tmp_path / "cache").glob("*.tar"):
            os.utime(kept, (long_ago, long_ago))
    begin("FROM a\nRUN echo 1 > /first\n")  # which was made before
    begin("FROM a\nRUN echo 1 > /third\n")
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 2


def test_images_are_made_before_anything_is_played(begin: Begin, tmp_path: Path) -> None:
    begin("FROM a\nRUN echo 1 > /first\n")
    environment = Harbor(str(tmp_path / "tasks0"), base="host", cache=str(tmp_path / "other"))
    assert environment.preparations() == [{"task": "one"}]
    environment.prepare({"task": "one"})
    assert environment.preparations() == []
    (kept,) = (tmp_path / "other").glob("*.tar")
    before = kept.stat().st_ino
    environment.prepare({"task": "one"})
    assert kept.stat().st_ino == before, "it is not made again"


def test_an_image_that_cannot_be_made_is_told_where_it_is_prepared(
    begin: Begin, tmp_path: Path
) -> None:
    begin()
    with (tmp_path / "tasks0/one/environment/Dockerfile").open("a") as file:
        file.write("RUN exit 3\n")
    environment = Harbor(str(tmp_path / "tasks0"), base="host", cache=str(tmp_path / "cache"))
    with pytest.raises(EnvironmentBroken, match=r"Dockerfile:4: RUN exit 3: exit status 3"):
        environment.prepare({"task": "one"})


def test_episodes_do_not_see_one_another(begin: Begin) -> None:
    one, other = begin(), begin()
    bash(one, "echo changed > notes.txt")
    assert bash(other, "cat notes.txt") == "notes"


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("RUN echo words; exit 3", "RUN echo words; exit 3: exit status 3: words", "libra help"),
        ("RUN pip install nothing-there", "RUN pip install nothing-there: exit", "has no network"),
    ],
)
def test_a_step_that_fails_is_told_with_its_line(
    begin: Begin, line: str, said: str, hint: str
) -> None:
    with pytest.raises(EnvironmentBroken, match=r"Dockerfile:4: ") as caught:
        begin(f"{DOCKERFILE}{line}\n")
    assert said in str(caught.value)
    assert hint in caught.value.hint


def test_a_base_must_be_named(begin: Begin) -> None:
    with pytest.raises(EnvironmentBroken, match=r"FROM python:3\.12: no base has this name"):
        begin(base=None)
    with pytest.raises(EnvironmentBroken, match="is no directory"):
        begin(bases={"python:3.12": "/nowhere"})


def small_root(directory: Path) -> Path:
    """A root directory with a shell and little else, as an unpacked image would be."""
    programs = [str(shutil.which(one)) for one in ("sh", "bash", "tar", "mkdir", "chmod", "cat")]
    programs += [str(shutil.which(one)) for one in ("rm", "tail", "test")]
    told = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    libraries = {word for word in told.split() if word.startswith("/") and ":" not in word}
    for name in (*programs, *libraries):
        target = directory / name.removeprefix("/usr").lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(name).resolve(), target)
    (directory / "usr").mkdir()
    for name in ("bin", "lib", "lib64"):
        if (directory / name).is_dir():
            (directory / "usr" / name).symlink_to(f"/{name}")
    (directory / "etc").mkdir()
    (directory / "etc/of-the-base").write_text("base\n")
    return directory


@pytest.fixture
def root() -> Iterator[Path]:
    # Not below pytest's own directory, which only its owner may enter: of root, sandboxes are
    # opened as nobody.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield small_root(Path(directory) / "root")


def test_an_unpacked_image_is_a_base_and_stays_as_it_is(begin: Begin, root: Path) -> None:
    environment = begin(base=None, bases={"python:3.12": str(root)})
    assert bash(environment, "cat /etc/of-the-base notes.txt") == "base\nnotes"
    bash(environment, "echo changed > /etc/of-the-base; rm -f /bin/tail; echo yes > done.txt")
    assert environment.score("") == 1.0
    assert (root / "etc/of-the-base").read_text() == "base\n"
    assert (root / "bin/tail").exists()
    assert not (root / "app").exists()
