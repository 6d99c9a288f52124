"""A command as an agent: what it sees, how it ends, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from libra_cli.config.errors import AgentFailed, LibraError
from libra_cli.envs.agents import command as command_module
from libra_cli.envs.agents import host
from libra_cli.runtime.hosts.threads import Threads
from tests import agents
from tests.asked_model import AskedModel

ASK = """
import json, os, sys, urllib.request
def post(url, body):
    data = json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return json.load(answer)
task = json.load(open(os.environ["LIBRA_TASK"]))
body = {"model": os.environ["LIBRA_MODEL"], "messages": task["messages"]}
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
"""


@pytest.fixture(params=["controller", "node"])
def command(request, play):
    """Play one trajectory of a command, here or on a node."""
    where = {"nodes": ["a"]} if request.param == "node" else {}

    def run(*turns, command, **spec):
        return play(None, *turns, command=command, **where, **spec)

    return run


WITH_A_JUDGE = {
    "nodes": [{"host": "a", "slots": 3, "pool": ["rollout", "train", "models"]}],
    "models": [{"name": "judge", "path": "/judge"}],
}
"""Changes of the recipe that serve one."""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", ASK + script]


def gone(pid: int) -> bool:
    """Whether a process is no more, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_plays_and_the_environment_scores(command, tmp_path):
    made, result = command("said", command=python(""))
    assert (result.done, result.reward) == (True, 0.0)
    assert made.trajectory.turns == 1
    assert not (tmp_path / "agents").exists()


def test_a_command_may_post_its_reward(command):
    script = 'post(os.environ["LIBRA_REWARD_URL"], {"reward": 0.5})'
    _, result = command("said", command=python(script))
    assert result.reward == 0.5


def test_a_command_sees_its_own_directory_and_environment_only(command, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "of the controller")
    script = f"""
print(sorted(os.listdir(".")), os.environ.get("SOME_TOKEN"), os.environ["HERE"], flush=True)
json.dump([os.listdir("."), dict(os.environ), os.getcwd()], open({str(tmp_path / "out")!r}, "w"))
open("written", "w").write("x")
"""
    files = tmp_path / "files"
    files.mkdir()
    (files / "tool.py").write_text("")
    command(
        "said",
        command=python(script),
        env={"HERE": "yes"},
        directory=str(files),
        secrets={"SEARCH_KEY": "of the recipe"},
    )
    listed, environment, here = json.loads((tmp_path / "out").read_text())
    assert listed == ["tool.py"]
    assert "SOME_TOKEN" not in environment
    assert environment["SEARCH_KEY"] == "of the recipe"
    assert environment["ANTHROPIC_BASE_URL"] + "/v1" == environment["OPENAI_BASE_URL"]
    assert environment["HOME"] == here
    assert not Path(here).exists()
    assert os.listdir(files) == ["tool.py"]


def test_an_exit_status_is_a_failure_with_the_last_words(command):
    script = 'print("x" * 5000, end="", flush=True); sys.exit("no such tool: seek")'
    with pytest.raises(AgentFailed, match=r"exit status 1: x+.*no such tool: seek") as caught:
        command("said", command=python(script))
    assert len(str(caught.value)) < 3000


def test_the_last_words_of_an_agent_do_not_tell_its_secrets(command):
    script = 'sys.exit("refused with " + os.environ["SEARCH_KEY"])'
    with pytest.raises(AgentFailed, match=r"refused with \[masked\]") as caught:
        command("said", command=python(script), secrets={"SEARCH_KEY": "xyzzy-of-the-recipe"})
    assert "xyzzy" not in str(caught.value)


def test_a_program_that_is_not_there_is_an_error_in_words(command):
    with pytest.raises(LibraError, match="there is no program 'no-such-program'"):
        command(command=["no-such-program"])


def test_a_command_that_prints_without_end_is_ended(play, monkeypatch):
    monkeypatch.setattr(command_module, "MOST_OUTPUT", 100_000)
    script = 'while True: print("x" * 1000)'
    with pytest.raises(AgentFailed, match="printed more than"):
        play(None, "said", command=python(script))


def started(tmp_path: Path, then: str) -> str:
    """A script that starts a process which outlives it, and says which."""
    return f"""
import subprocess
child = subprocess.Popen(["sleep", "3600"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
{then}
"""


def assert_gone(tmp_path: Path) -> None:
    pid = int((tmp_path / "pid").read_text())
    give_up = time.monotonic() + 5.0
    while not gone(pid):
        assert time.monotonic() < give_up, f"{pid} is left"
        time.sleep(0.01)


def test_what_a_command_leaves_running_is_ended_with_it(command, tmp_path):
    command("said", command=python(started(tmp_path, "")))
    assert_gone(tmp_path)


def test_a_command_that_does_not_end_is_killed_with_its_children(command, tmp_path):
    script = started(tmp_path, "import time; time.sleep(3600)")
    with pytest.raises(AgentFailed, match=r"neither asked nor ended for 0\.5 s after turn 1"):
        command("said", command=python(script), timeout_s=0.5)
    assert_gone(tmp_path)


def test_a_command_that_cannot_be_followed_is_ended(play, monkeypatch):
    started_here: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def kept(*arguments, **named):
        started_here.append(start(*arguments, **named))
        return started_here[-1]

    def refuse(pid):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", kept)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(AgentFailed, match=r"cannot be started.*Too many open files"):
        play(None, "said", command=["sleep", "3600"])
    (process,) = started_here
    assert gone(process.pid)


def test_a_machine_without_threads_left_fails_the_agent_in_words(play, monkeypatch):
    run = Threads.run
    refused: list[object] = []

    def refuse_first(self, function):
        if self._name == "libra-agent" and not refused:
            refused.append(function)
            raise RuntimeError("can't start new thread beside xyzzy-of-the-recipe")
        run(self, function)

    monkeypatch.setattr(Threads, "run", refuse_first)
    known = {"KEY": "xyzzy-of-the-recipe"}
    words = r"cannot be run: can't start new thread beside \[masked\]"
    with pytest.raises(AgentFailed, match=words):
        play(None, "said", command=python(""), timeout_s=3.0, secrets=known)


def test_a_node_without_threads_left_fails_the_agent_and_goes_on(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    told = []

    async def go():
        made = host.AgentHost(tmp_path, cast("asyncio.StreamWriter", None))
        monkeypatch.setattr(made, "_tell", lambda *what: told.append(what))
        hello = {"command": [sys.executable], "env": {}, "files": []}
        made._take("hello", 0, hello)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        made._take("start", 7, {"id": "0.0.0", "task": "{}", "api_key": "k", "model": "m"})

    asyncio.run(go())
    assert told == [("ready", 0, ""), ("ended", 7, "can't start new thread")]


def test_many_commands_on_a_node_play_at_once(play):
    async def scene(made):
        results = [await made.play(["said"], member=number) for number in range(3)]
        return results[-1]

    _, result = play(None, scene=scene, command=python(""), nodes=["a", "a"], concurrency=2)
    assert result.done


def test_commands_of_a_node_that_is_lost_have_failed_and_the_next_ones_play(
    play, monkeypatch, tmp_path
):
    streams = []
    opened = agents.open_here

    async def open_here(node, process, module):
        streams.append(await opened(node, process, module))
        return streams[-1]

    async def scene(made):
        played = asyncio.Event()

        def turns():
            for number in range(1000):
                if number == 3:
                    played.set()
                yield "said"

        async def lose():
            await played.wait()
            await streams[0].close()

        async with asyncio.TaskGroup() as group:
            group.create_task(lose())
            with pytest.raises(AgentFailed, match="the connection to its agents broke"):
                await made.play(turns(), member=1)
        return await made.play(["said"] * 2, member=2)

    monkeypatch.setattr(agents, "open_here", open_here)
    # A process that is killed cannot remove its files: with real hosts they are the run's.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    flag = tmp_path / "flag"
    script = f"""
import time
if not os.path.exists({str(flag)!r}):
    open({str(flag)!r}, "w").close()
    while True:
        post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
        time.sleep(0.05)
"""
    changes = {"rollout": {"max_turns": 1000}}
    _, result = play(None, scene=scene, command=python(script), nodes=["a"], changes=changes)
    assert result.done


def test_a_command_asks_a_frozen_model_with_its_own_key(command):
    model = AskedModel()
    script = """
judged = post(os.environ["LIBRA_MODEL_JUDGE_URL"] + "/chat/completions", {"messages": []})
reward = int(judged["choices"][0]["message"]["content"].removeprefix("score: ")) / 10
assert "LIBRA_MODELS_KEY" not in os.environ
post(os.environ["LIBRA_REWARD_URL"], {"reward": reward})
"""
    _, result = command(
        "said", command=python(script), model=model, served="judge", changes=WITH_A_JUDGE
    )
    assert result.reward == 0.7
    assert model.called == [model.address.url.removeprefix("http://")]


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("judge/v1/chat/completions", "another", 401),
        ("teacher/v1/chat/completions", "", 404),
        ("judge/metrics", "", 404),
        ("judge/v1/../metrics", "", 404),
        ("judge/v1/../../teacher/v1/chat/completions", "", 404),
    ],
)
def test_a_command_is_shown_no_other_model_and_no_other_page(command, path, key, status):
    model = AskedModel()
    script = f"""
url = os.environ["LIBRA_MODEL_JUDGE_URL"].replace("judge/v1", {path!r})
own = os.environ["OPENAI_API_KEY"]
try:
    post(url.replace(own, {key!r} or own), {{}})
    told = 0
except urllib.error.HTTPError as error:
    told = error.code
post(os.environ["LIBRA_REWARD_URL"], {{"reward": told}})
"""
    _, result = command(
        "said", command=python(script), model=model, served="judge", changes=WITH_A_JUDGE
    )
    assert result.reward == status
    assert model.called == []
