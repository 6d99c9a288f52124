"""A run of two real SSH hosts, of which one has no slots and plays all environments.

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
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("torch")

RUN_S = 180.0


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
