"""Agents in the sandbox of the environment whose task they have, against the real one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from libra_cli.config.errors import AgentFailed
from libra_cli.envs.agents.enclosed import AgentPlace, EnclosedJob
from libra_cli.envs.pointer_chase import PointerChase
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from tests import agents
from tests.asked_model import AskedModel
from tests.sandboxes import needs_sandboxes, opened

pytestmark = needs_sandboxes

ASK = """
import json, os, subprocess, sys, time, urllib.request
def post(url, body):
    data = json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return json.load(answer)
messages = json.load(open(os.environ["LIBRA_TASK"]))["messages"]
def turn():
    body = {"model": os.environ["LIBRA_MODEL"], "messages": messages}
    said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    messages.append(said)
    return said["content"]
def do(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    messages.append({"role": "user", "content": done.stdout + done.stderr + "."})
    return done
"""
LOOP = """
while (said := turn()) != "done":
    do(said)
"""
TASK = {
    "instruction": "Write 42 into answer.",
    "files": {"numbers": "41 42 43"},
    "check": "grep -qx 42 answer",
}


@pytest.fixture(params=["in process", "in a worker"])
def played(request, play, tmp_path):
    """Play a trajectory of a Python script, as an agent on a task in a shell."""
    workers = None if request.param == "in process" else {"processes": 2}

    def run(*turns, script=LOOP, task=TASK, sandbox=None, **spec):
        rows = tmp_path / "tasks.jsonl"
        rows.write_text(json.dumps(task) + "\n")
        environment = {
            "name": "shell",
            "args": {},
            "tasks": str(rows),
            "workers": workers,
            "sandbox": sandbox or {},
        }
        command = spec.pop("command", ["python3", "-c", ASK + script])
        changes = {"environment": environment, **spec.pop("changes", {})}
        made, result = play(None, *turns, command=command, changes=changes, in_sandbox=True, **spec)
        return made, result

    return run


def test_what_an_agent_does_in_the_sandbox_is_scored(played):
    _, result = played("cat numbers", "echo 42 > answer", "done")
    assert (result.done, result.reward) == (True, 1.0)
    _, result = played("echo 41 > answer", "done")
    assert result.reward == 0.0


@pytest.mark.parametrize(
    ("answer", "posted", "reward"), [(41, 1.0, 0.0), (42, 2.0, 1.0), (42, 0.0, 0.0)]
)
def test_a_reward_that_is_posted_from_the_sandbox_can_only_lower_what_is_scored(
    played, answer, posted, reward
):
    """The model may have posted it, by a command."""
    script = f"""
do(turn())
post(os.environ["LIBRA_REWARD_URL"], {{"reward": {posted}}})
"""
    _, result = played(f"echo {answer} > answer", script=script)
    assert (result.done, result.reward) == (True, reward)
    assert result.metrics == {"passed": float(answer == 42)}


def test_it_reaches_the_endpoint_and_nothing_else(played, tmp_path):
    script = f"""
import socket
said = [turn(), os.path.exists({str(tmp_path)!r}), os.getcwd()]
for address in (("127.0.0.1", 22), ("1.1.1.1", 80)):
    try:
        socket.create_connection(address, 1)
        said.append("reached")
    except OSError as error:
        said.append(type(error).__name__)
open("answer", "w").write("42\\n")
expected = ["go on", False, "/work", "ConnectionRefusedError", "OSError"]
sys.exit(0 if said == expected else repr(said))
"""
    _, result = played("go on", script=script)
    assert result.reward == 1.0


def test_it_asks_a_frozen_model_by_the_same_port(played):
    model = AskedModel()
    script = """
turn()
judged = post(os.environ["LIBRA_MODEL_JUDGE_URL"] + "/chat/completions", {"messages": []})
if judged["choices"][0]["message"]["content"] == "score: 7":
    open("answer", "w").write("42\\n")
"""
    changes = {
        "nodes": [{"host": "a", "slots": 3, "pool": ["rollout", "train", "models"]}],
        "models": [{"name": "judge", "path": "/judge"}],
    }
    _, result = played("go on", script=script, model=model, served="judge", changes=changes)
    assert result.reward == 1.0
    assert len(model.called) == 1


def test_it_has_its_files_and_variables_and_no_others(played, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "of the controller")
    files = tmp_path / "files"
    (files / "lib").mkdir(parents=True)
    (files / "lib" / "told.py").write_text("WORD = 'told'\n")
    (files / "agent.py").write_text(
        ASK
        + """
from lib.told import WORD
turn()
assert "SOME_TOKEN" not in os.environ, "it sees the controller's"
assert os.environ["SEARCH_KEY"] == "of the recipe" and os.environ["HERE"] == "yes"
assert os.listdir(".") == ["numbers"], os.listdir(".")
open("answer", "w").write("42\\n" if WORD == "told" else "")
"""
    )
    _, result = played(
        "said",
        command=["sh", "-c", "exec python3 $HOME/agent.py"],
        directory=str(files),
        env={"HERE": "yes"},
        secrets={"SEARCH_KEY": "of the recipe"},
    )
    assert result.reward == 1.0


def test_an_exit_status_is_a_failure_with_the_last_words(played):
    with pytest.raises(AgentFailed, match=r"exit status 3: .*no such tool"):
        played("said", script='turn(); print("no such tool", flush=True); sys.exit(3)')


def test_a_model_that_ends_its_agent_with_all_else_is_scored(played):
    """It has done that by a command of its own, as it might have emptied the directory."""
    _, result = played("echo 42 > answer", "kill -9 -1")
    assert (result.done, result.reward) == (True, 1.0)


def test_what_an_agent_leaves_running_ends_before_the_check(played):
    check = "rm -f late; sleep 0.3; ! [ -e late ] && grep -qx 42 answer"
    late = "setsid sh -c 'while :; do touch late; sleep 0.01; done' >/dev/null 2>&1 &"
    _, result = played(late, "echo 42 > answer", "done", task={**TASK, "check": check})
    assert result.reward == 1.0


def test_a_program_that_is_not_in_the_sandbox_is_missed_before_anything_is_played(played):
    with pytest.raises(AgentFailed, match="no program '/opt/none' in the sandbox") as caught:
        played(command=["/opt/none", "--help"])
    assert "readable" in caught.value.hint


def test_an_agent_that_is_silent_is_ended_with_its_sandbox(played):
    began = time.monotonic()
    with pytest.raises(AgentFailed, match="neither asked nor ended"):
        played("x", script="turn(); time.sleep(3600)", timeout_s=1.5)
    assert time.monotonic() - began < agents.DEADLINE_S
    deadline = time.monotonic() + 10.0
    while any("time.sleep(3600)" in said for said in _command_lines()):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.1)


def _command_lines() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            said = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        found += [said] if pid != str(os.getpid()) else []
    return found


def test_large_answers_and_requests_pass(played):
    script = """
messages[0]["content"] += " x" * 40
body = {"model": os.environ["LIBRA_MODEL"], "messages": messages, "ignored": "y" * 3_000_000}
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
open("answer", "w").write("42\\n")
"""
    _, result = played("said", script=script)
    assert result.reward == 1.0


class Boxed(PointerChase):
    """An environment that opens sandboxes of its own, and none for agents."""

    def __init__(self, sandbox: Sandboxes) -> None:
        super().__init__()


def test_an_environment_that_has_no_place_for_agents_is_refused(play):
    environment = {"name": f"{__name__}:Boxed", "args": {}, "sandbox": {}}
    with pytest.raises(AgentFailed, match="has no sandbox for an agent"):
        play(None, command=["true"], changes={"environment": environment}, in_sandbox=True)


def test_the_time_of_a_task_ends_an_agent_and_it_is_scored():
    with opened() as sandbox:
        place = AgentPlace(sandbox, sandbox.work, time_s=0.5)
        job = EnclosedJob(["sh", "-c", "echo 1 > here; sleep 60"], {}, [], "{}", 9, "k", "m", 30.0)
        end = job.play(place)
        assert (end.code, end.flooded) == (0, False)
        assert sandbox.read("here") == b"1\n"
        slow = EnclosedJob(["sleep", "60"], {}, [], "{}", 9, "k", "m", 0.5)
        assert slow.play(AgentPlace(sandbox, sandbox.work)).code != 0
