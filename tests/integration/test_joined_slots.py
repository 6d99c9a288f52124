"""Two servers of one real SSH host become one of two ranks, and two again, while others serve.

One long run carries the claims: one host has a server all the while, one has two slots that are
joined and split, one holds the trainer. It ends at the user's word. The servers compute nothing,
and every night they are vLLM's; vLLM's proof over two ranks is in ``test_proof``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra_cli.report.status.migration_impact import migration_impacts
from libra_cli.report.status.plans import moves
from libra_cli.runtime.store.reader import Reader
from tests.cluster.recipe import with_fake_servers
from tests.integration.test_moves import (
    GROUPS,
    STOPPED,
    Scene,
    check_hosts,
    check_rewards,
    check_trajectories,
    recipe_text,
    workdir_with,
)
from tests.live import BACKENDS, START_S, live, require
from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("vllm")

STALL_S = 30.0
"""The longest that the other server may end no turn: on two cores, what starts takes both."""


def _recipe(net: Network, workdir: Path, backend: str) -> str:
    document = yaml.safe_load(recipe_text(net, workdir))
    document["run"]["name"] = "shapes"
    document["nodes"][1] |= {"slots": 2, "pool": "rollout"}
    document["rollout"]["buckets"] = [
        {"name": "small", "max_num_seqs": 16},
        {"name": "large", "tensor_parallel": 2, "max_num_seqs": 32, "slots": 0},
    ]
    if backend == "fake":
        document = with_fake_servers(document)
    document["weight_sync"] = document.get("weight_sync", {}) | {"trusted_interface": "eth0"}
    return yaml.safe_dump(document)


def _order(scene: Scene, flag: str, slot: str) -> None:
    """Have the shape of two slots changed; return when every slot is where it is to be."""
    ended = "SELECT count(*) FROM moves WHERE ended_at IS NOT NULL"
    ((before,),) = scene.run.query(ended)
    done = scene.run.libra("rebalance", str(scene.run.run_dir), flag, slot)
    scene.answers[f"{flag} {slot}"] = done
    if done.returncode:
        return
    # One for each of the two slots and one for what they are together.
    arrived = [(before + 3,)]
    scene.run.wait("arrival", lambda: scene.run.query(ended) == arrived, timeout_s=2 * START_S)


@pytest.fixture(scope="module", params=BACKENDS)
def shaped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Scene]:
    """A run whose two slots are joined, serve together for some steps, and are split again."""
    base = tmp_path_factory.mktemp("run")
    with network(3, base / "net") as net:
        workdir = workdir_with(models, tmp_path_factory.mktemp("hosts"))
        text = _recipe(net, workdir, request.param)
        with live(text, base, net.home) as run:
            scene = Scene(run, net)
            run.wait_step(2, timeout_s=2 * START_S)  # the model is built first
            both = f"{scene.hybrid}/0+1"
            _order(scene, "--join", f"{scene.core}/0+1")
            _order(scene, "--join", both)
            scene.status = _status(scene)
            scene.more_steps(2)
            _order(scene, "--split", both)
            scene.more_steps(2)
            scene.stop()
            yield scene


def _status(scene: Scene) -> dict[str, Any]:
    done = scene.run.libra("status", "--json", str(scene.run.run_dir))
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_two_servers_become_one_and_two_again(shaped):
    host = shaped.hybrid
    sql = "SELECT slot, from_role, to_role, state, detail FROM moves ORDER BY move"
    there = [(f"{host}/0", f"{host}/0+1"), (f"{host}/1", f"{host}/0+1")]
    assert shaped.run.query(sql) == [
        *((part, "rollout", "idle", "done", f"makes way for {both}") for part, both in there),
        (f"{host}/0+1", "idle", "rollout", "done", f"instead of {host}/0, {host}/1"),
        *((part, "idle", "rollout", "done", f"instead of {both}") for part, both in there),
        (f"{host}/0+1", "rollout", "idle", "done", f"makes way for {host}/0, {host}/1"),
    ]


def test_versions_come_over_the_trusted_interface_and_are_proved(shaped):
    told = _status(shaped)["sync"]
    sql = "SELECT kind, verified, detail, sent_bytes - bytes FROM syncs WHERE verified"
    syncs = shaped.run.query(sql)
    by_fabric = [sync for sync in syncs if sync[0] == "fabric"]
    # A host that imports torch for longer than it is waited for is left out for a while.
    assert len(by_fabric) == told["fabric"] > 0, syncs
    assert all(detail == "" for _, _, detail, _ in by_fabric)
    pulled = [sync for sync in syncs if sync[0] in ("full", "delta")]
    assert len(pulled) == told["fabric_missed"]
    assert all(detail.startswith("not over the fabric: ") for _, _, detail, _ in pulled)


def test_every_server_of_every_shape_plays(shaped):
    host = shaped.hybrid
    played = dict(shaped.run.query("SELECT slot, count(*) FROM turns GROUP BY slot"))
    assert played.keys() == {f"{shaped.net.hosts[0].address}/0"} | {
        f"{host}/{parts}" for parts in ("0", "1", "0+1")
    }
    for slot in (f"{host}/0", f"{host}/1"):
        sql = f"SELECT count(DISTINCT incarnation) FROM turns WHERE slot = '{slot}'"
        assert shaped.run.query(sql) == [(2,)], "before and after"


def test_status_has_the_slots_that_exist(shaped):
    host, other = shaped.hybrid, shaped.net.hosts[0].address
    told = {slot["slot"]: slot["state"] for slot in shaped.status["slots"]}
    assert told.keys() == {f"{host}/0+1", f"{other}/0", f"{shaped.core}/0"}
    assert told[f"{host}/0+1"] == "serving"
    assert {s["slot"] for s in _status(shaped)["slots"]} == {
        f"{host}/0",
        f"{host}/1",
        f"{other}/0",
        f"{shaped.core}/0",
    }


def test_what_cannot_be_joined_is_refused(shaped):
    done = shaped.answers[f"--join {shaped.core}/0+1"]
    assert done.returncode == 2
    assert f"there is no slot {shaped.core}/1" in done.stderr


@pytest.mark.parametrize("shaped", BACKENDS[1:], indirect=True)  # moves of others are too quick
def test_the_other_server_and_the_trainer_go_on(shaped):
    other = f"{shaped.net.hosts[0].address}/0"
    first = "(SELECT min(started_at) FROM moves)"
    states = f"SELECT DISTINCT state FROM slot_states WHERE slot = '{other}' AND since > {first}"
    assert shaped.run.query(states) in ([], [("stopping",), ("idle",)]), "at the end of the run"
    with Reader(shaped.run.run_dir) as reader:
        told = moves(reader, now=0.0)
        for move, seen in migration_impacts(reader, told):
            if move.to_role != "rollout":
                continue
            began, ended = move.started_at, move.ended_at or 0.0
            assert seen.during.tokens_per_s > 0
            assert any(began < step.ended_at < ended for step in reader.steps())
            turns = [turn for turn in reader.turns_between(began, ended) if turn.slot == other]
            ends = sorted(turn.ended_at for turn in turns if turn.ended_at < ended)
            pauses = [then - before for before, then in pairwise([began, *ends, ended])]
            assert max(pauses) < STALL_S, "the longest time in which the other ends no turn"


def test_nothing_of_any_trajectory_is_lost(shaped):
    check_trajectories(shaped)
    check_rewards(shaped)
    steps = [step for (step,) in shaped.run.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))
    assert shaped.run.groups_of_steps() == [GROUPS] * len(steps)
    assert shaped.run.process.returncode == STOPPED, shaped.run.told()


def test_trajectories_go_on_elsewhere_with_their_tokens(shaped):
    gone = f"SELECT count(*) FROM turns WHERE moved_from LIKE '{shaped.hybrid}/%'"
    assert shaped.run.query(gone) != [(0,)]


@pytest.mark.parametrize("shaped", BACKENDS[1:], indirect=True)
def test_every_version_is_verified_on_the_joined_server_too(shaped):
    sql = "SELECT count(*), max(gap) FROM syncs WHERE slot = '{}' AND verified"
    ((number, gap),) = shaped.run.query(sql.format(f"{shaped.hybrid}/0+1"))
    assert number >= 2
    assert gap < 1e-3
    unproved = "SELECT count(*) FROM syncs WHERE NOT verified AND gap > 1e-3"
    assert shaped.run.query(unproved) == [(0,)]
    ((gap,),) = shaped.run.query("SELECT max(logprob_gap) FROM steps")
    assert gap < 1e-3


def test_nothing_is_left_on_any_host(shaped):
    check_hosts(shaped)
