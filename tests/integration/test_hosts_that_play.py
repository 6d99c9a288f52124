"""Runs of two real SSH hosts, of which one has no slots and plays all environments, or agents.

The servers compute nothing: nothing here is about vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.recipe import with_fake_servers
from tests.live import CHECKOUT, QUICK_S, Live, live, require
from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("torch")

RUN_S = 400.0
AGENT = """
import json, os, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

messages = json.load(open(os.environ["LIBRA_TASK"]))["messages"]
for _ in range(3):
    body = {"model": "any", "messages": messages}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
reward = float(os.environ["LIBRA_NODE"] == "PLACE")
post(os.environ["LIBRA_REWARD_URL"], {"reward": reward})
"""
"""It asks for three turns, and is rewarded for where it runs."""


def recipe(net: Network, workdir: Path) -> dict[str, Any]:
    document = with_fake_servers(yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text()))
    nodes: list[dict[str, Any]] = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": sys.executable,
            "workdir": str(workdir / host.name),
            "env": {"OMP_NUM_THREADS": "1"},
        }
        for host in net.hosts
    ]
    nodes[0] |= {"slots": 2, "pool": ["rollout", "train"]}
    nodes[1] |= {"pool": "environments"}
    workers = {"processes": 64, "nodes": [net.hosts[1].address]}
    return document | {
        "run": {"name": "players", "steps": 3},
        "nodes": nodes,
        "environment": document["environment"] | {"workers": workers},
        "rollout": document["rollout"] | {"group_size": 4},
        "training": {"groups_per_step": 2},
    }


def with_agents(document: dict[str, Any], net: Network, base: Path) -> dict[str, Any]:
    """The same, with commands on the host that plays, and environments in the controller."""
    node = net.hosts[1].address
    (base / "agent").mkdir()
    (base / "agent/agent.py").write_text(AGENT.replace("PLACE", node))
    environment = {key: document["environment"][key] for key in ("name", "args")}
    command = ["python3", "agent.py"]
    agent = {"command": command, "directory": "agent", "nodes": [node], "timeout_s": 120}
    return document | {"environment": environment, "agent": agent}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(2, tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def ended(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    base = tmp_path_factory.mktemp("run")
    with live(yaml.safe_dump(recipe(net, base / "hosts")), base, net.home) as run:
        run.wait("end", lambda: run.process.poll() is not None, timeout_s=RUN_S)
        yield run


def test_a_host_without_slots_plays_a_run_to_its_end(ended: Live, net: Network) -> None:
    assert ended.process.returncode == 0, ended.told()
    assert ended.query("SELECT max(step) FROM steps") == [(3,)]
    slots = {node for (node,) in ended.query("SELECT DISTINCT node FROM slots")}
    assert slots == {net.hosts[0].address}


def test_it_gets_code_and_neither_a_model_nor_versions(ended: Live) -> None:
    trains, plays = sorted((ended.run_dir.parents[1] / "hosts").iterdir())
    assert {path.name for path in trains.iterdir()} >= {"code", "models", "runs"}
    assert {path.name for path in plays.iterdir()} == {"code", "runs"}


def test_nothing_is_left_running_on_it(ended: Live) -> None:
    assert ended.wait("end of all", lambda: not ended.processes(), timeout_s=QUICK_S)


@pytest.fixture(scope="module")
def ended_with_agents(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    base = tmp_path_factory.mktemp("agents")
    document = with_agents(recipe(net, base / "hosts"), net, base)
    with live(yaml.safe_dump(document), base, net.home) as run:
        run.wait("end", lambda: run.process.poll() is not None, timeout_s=RUN_S)
        yield run


def test_commands_play_as_agents_on_a_host_without_slots(ended_with_agents: Live) -> None:
    run = ended_with_agents
    assert run.process.returncode == 0, run.told()
    assert run.query("SELECT max(step) FROM steps") == [(3,)]
    played = "FROM trajectories WHERE state = 'finished'"
    assert run.query(f"SELECT DISTINCT turns, reward {played}") == [(3, 1.0)]
    assert run.query("SELECT count(*) FROM trajectories WHERE state = 'failed'") == [(0,)]
    assert run.query(f"SELECT min(environment_s) > 0, min(waited_s) >= 0 {played}") == [(1, 1)]


def test_no_agent_and_nothing_of_theirs_is_left(ended_with_agents: Live) -> None:
    run = ended_with_agents
    assert run.wait("end of all", lambda: not run.processes(), timeout_s=QUICK_S)
    _, plays = sorted((run.run_dir.parents[1] / "hosts").iterdir())
    assert {path.name for path in plays.iterdir()} == {"code", "runs"}
