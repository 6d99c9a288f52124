"""The environment ``shell``: its rows, its tools and its reward, and how a recipe gives it one."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken, SandboxBroken
from libra_cli.config.sandbox import SandboxSection
from libra_cli.envs.protocol import ToolCall, ToolFailed
from libra_cli.envs.sandbox.sandbox import Shell
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from libra_cli.envs.sandbox.spec import SandboxLimits, SandboxSpec
from libra_cli.envs.shell.environment import ShellTasks
from libra_cli.envs.shell.tools import SandboxTools
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import EnvironmentFactory, EnvironmentSource
from tests.sandboxes import needs_sandboxes

pytestmark = needs_sandboxes

ROW: dict[str, Any] = {
    "instruction": "Write 5 into x.",
    "files": {"in/a": "line 1\nline 2\n"},
    "setup": ["test -f in/a", "echo 1 > begun"],
    "check": "python3 hidden.py",
    "check_files": {"hidden.py": "assert open('x').read().strip() == '5'"},
}


@pytest.fixture
def shell() -> Iterator[ShellTasks]:
    one = ShellTasks()
    one.reset(ROW, 0)
    yield one
    one.close()


def call(shell: ShellTasks, name: str, **arguments: Any) -> str:
    return shell.step(ToolCall(name, arguments))


def test_a_task_is_set_up_done_and_checked(shell: ShellTasks) -> None:
    assert [one["function"]["name"] for one in shell.tools] == ["bash", "python", "editor"]
    assert call(shell, "bash", command="ls; cd in") == "begun\nin\n"
    assert call(shell, "bash", command="pwd; false") == "/work/in\n[exit code 1]"
    assert call(shell, "python", code="open('/work/x', 'w').write('5')") == "(no output)"
    assert shell.score("done") == 1.0
    assert shell.metrics() == {"passed": 1.0}


def test_what_was_not_done_has_no_reward(shell: ShellTasks) -> None:
    assert shell.score("done") == 0.0


def test_what_the_model_left_running_has_no_hand_in_the_check(shell: ShellTasks) -> None:
    call(shell, "bash", command="(while :; do echo > hidden.py; done) >/dev/null 2>&1 &")
    assert shell.score("done") == 0.0


def test_what_is_in_the_way_of_the_check_counts_against_the_model(shell: ShellTasks) -> None:
    call(shell, "bash", command="echo 5 > x; mkdir hidden.py")
    assert shell.score("done") == 0.0


@pytest.mark.parametrize(
    ("command", "check"),
    [
        ("touch hidden.py; chmod 444 hidden.py", "hidden.py"),
        ("touch hidden.py; chmod 444 hidden.py; chmod 555 .", "hidden.py"),
        ("ln -s expected hidden.py", "hidden.py"),
        ("touch expected; ln expected hidden.py", "hidden.py"),
        ("ln -s . tests", "tests/expected"),
    ],
)
def test_the_check_is_of_its_files_whatever_the_model_puts_there(command: str, check: str) -> None:
    files = {"hidden.py": "exit(1)", "tests/expected": "exit(1)", "expected": "5"}
    shell = ShellTasks()
    shell.reset({"instruction": "x", "check": f"python3 {check}", "check_files": files}, 0)
    call(shell, "bash", command=command)
    assert shell.score("done") == 0.0
    assert shell.metrics() == {"passed": 0.0}
    shell.close()


def test_files_of_the_model_make_way_for_those_of_the_check(shell: ShellTasks) -> None:
    call(shell, "bash", command="echo 5 > x; echo no > hidden.py; chmod 444 hidden.py")
    assert shell.score("done") == 1.0


def test_the_editor_views_creates_and_replaces(shell: ShellTasks) -> None:
    def edit(command: str, path: str = "in/a", **rest: Any) -> str:
        return call(shell, "editor", command=command, path=path, **rest)

    assert edit("view") == "     1  line 1\n     2  line 2"
    assert edit("view", first=2, last=9) == "     2  line 2"
    assert edit("str_replace", old="line 2", new="two") == "in/a: replaced in line 2"
    assert edit("create", path="new/b", text="x\ny\n") == "new/b: 2 lines written"
    assert call(shell, "bash", command="cat in/a new/b") == "line 1\ntwo\nx\ny\n"
    wrong = {
        "old must occur once, and occurs 2 times": ("str_replace", "new/b", {"old": "\n"}),
        "old must occur once, and occurs 0 times": ("str_replace", "new/b", {}),
        "no/c: No such file or directory": ("view", "no/c", {}),
        "/usr/bin/x: (Permission denied|Read-only)": ("create", "/usr/bin/x", {}),
        "no command 'undo', only view": ("undo", "in/a", {}),
    }
    for message, (command, path, rest) in wrong.items():
        with pytest.raises(ToolFailed, match=message):
            edit(command, path, **rest)


def tools_that_fail(error: int) -> SandboxTools:
    def refused(command: str, *, timeout_s: float | None) -> None:
        raise OSError(error, os.strerror(error))

    unused: Any = None
    full: Any = SimpleNamespace(run=refused)
    return SandboxTools(unused, shell=full)


def test_a_model_that_has_left_no_room_for_a_shell_reads_so() -> None:
    with pytest.raises(ToolFailed, match="no shell can be started: Resource temporarily"):
        tools_that_fail(errno.EAGAIN).step(ToolCall("bash", {"command": "true"}))


def test_what_the_host_has_too_few_of_is_not_told_the_model() -> None:
    with pytest.raises(OSError, match="Too many open files"):
        tools_that_fail(errno.EMFILE).step(ToolCall("bash", {"command": "true"}))


@pytest.mark.parametrize("tries", [3, 4])
def test_a_shell_that_lives_at_the_last_try_answers(tries: int) -> None:
    answers = [({"again": True}, b"")] * tries
    done = {"code": 0, "ended": False, "timed_out": False, "truncated": False, "note": ""}
    done["stdout_bytes"] = 0
    asked = iter([*answers, (done, b"")])
    channel: Any = SimpleNamespace(
        open_call=lambda told: SimpleNamespace(close=lambda: None),
        ask=lambda call, told: next(asked),
        news="",
    )
    shell = Shell(channel, {})
    if tries == 3:
        assert shell.run("true").code == 0
    else:
        with pytest.raises(OSError, match="killed as it starts"):
            shell.run("true")


KILLER = """
import os, signal, subprocess, sys
code = '''
import os, signal, time
while True:
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{number}/comm").read() == "bash\\\\n":
                os.kill(int(number), signal.SIGKILL)
        except OSError:
            pass
'''
subprocess.Popen([sys.executable, "-c", code], stdout=2, start_new_session=True)
"""


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("SIGKILL", "it is killed as it starts, by a process of the sandbox"),
        ("SIGHUP", "it ends as it starts, with exit status 129"),
    ],
)
def test_a_model_whose_processes_end_every_shell_reads_so(
    shell: ShellTasks, ends: str, why: str
) -> None:
    call(shell, "bash", command="true")
    call(shell, "python", code=KILLER.replace("SIGKILL", ends))
    wanted = f"no shell can be started: {why}"
    told, until = "", time.monotonic() + 20.0
    while told != wanted and time.monotonic() < until:
        try:
            told = call(shell, "bash", command="true")
        except ToolFailed as error:
            told = str(error)
    assert told == wanted


def test_text_is_bounded(shell: ShellTasks) -> None:
    text = call(shell, "bash", command="seq 1 100000")
    assert len(text) < 8_100
    assert "characters left out" in text


def test_a_reward_is_read_from_a_file() -> None:
    shell = ShellTasks(tools=["bash"])
    for check, reward in {"echo 0.25 > r": 0.25, "echo nan > r": 0.0, "true": 0.0}.items():
        shell.reset({"instruction": "x", "check": check, "reward_file": "r"}, 0)
        assert shell.score("") == reward
        shell.close()


@pytest.mark.parametrize(
    ("command", "check", "reward"),
    [
        ("echo 9 > r; chmod 444 r", "echo 0.5 > r", 0.5),
        ("echo 9 > r", "exit 1", 0.0),
        ("echo 9 > r; chmod 555 .", "echo 0.5 > r", 0.0),
        ("mkdir r", "echo 0.5 > r", 0.0),
        ("true", "echo 9 > r; sleep 60", 0.0),
    ],
)
def test_a_reward_is_the_checks_own_and_that_of_a_check_that_ends(
    command: str, check: str, reward: float
) -> None:
    shell = ShellTasks(Sandboxes(SandboxSpec(limits=SandboxLimits(time_s=1.0))))
    shell.reset({"instruction": "x", "check": check, "reward_file": "r"}, 0)
    call(shell, "bash", command=command)
    assert shell.score("") == reward
    shell.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "x"}, "needs an instruction and a check"),
        ({"check": "true"}, "needs an instruction and a check"),
        ({**ROW, "setup": "echo no >&2; exit 3"}, "ended with code 3: no"),
        ({**ROW, "files": {"/usr/x": ""}}, "/usr/x: (Permission denied|Read-only)"),
    ],
)
def test_rows_that_cannot_be_played_say_why(row: dict[str, Any], message: str) -> None:
    shell = ShellTasks()
    with pytest.raises(EnvironmentBroken, match=message):
        shell.reset(row, 0)
    shell.close()


def spec_of(**keys: Any) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate({"name": "shell", **keys})


def test_a_recipe_says_what_its_sandboxes_are() -> None:
    spec = spec_of(sandbox={"limits": {"disk_mb": 9}, "readable": "/opt", "user": 0})
    made: Any = EnvironmentFactory(spec).make()
    assert made._sandboxes.spec == SandboxSpec(
        readable=("/opt",), user=0, limits=SandboxLimits(disk_mb=9)
    )
    assert Sandboxes().spec == SandboxSpec.of(SandboxSection().model_dump())


def test_an_environment_without_commands_refuses_one() -> None:
    spec = EnvironmentSpec.model_validate({"name": "calculator", "sandbox": {}})
    with pytest.raises(EnvironmentBroken, match="has no parameter sandbox"):
        EnvironmentFactory(spec)


def test_a_host_without_bubblewrap_is_told_before_anything_is_played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxBroken, match="no bwrap") as broken:
        EnvironmentFactory(spec_of(sandbox={"limits": {"disk_mb": 10}}))
    assert broken.value.hint == "apt-get install bubblewrap"


@pytest.mark.parametrize("workers", [None, 2])
def test_episodes_are_played_in_sandboxes(workers: int | None) -> None:
    spec = spec_of(sandbox={}, workers=workers, tasks=[])

    async def scene() -> None:
        source = EnvironmentSource(spec, "shell")
        episode = await source.begin(CallLine())
        try:
            await episode.reset(ROW, 0, 0, 0)
            answer = await episode.step(ToolCall("bash", {"command": "echo 5 > x; id -u"}))
            assert answer.text == "1000\n"
            assert (await episode.score("", [])).reward == 1.0
        finally:
            episode.close(CallLine())
            await source.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
