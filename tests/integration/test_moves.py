"""Moves on three real SSH hosts: one serves, one changes sides, one holds the trainer's core.

One long run carries the claims, in which every order is carried out. It ends at the user's word,
since how many steps fit beside the moves is for the machine to say.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra_cli.runtime.store.reader import Reader
from tests.live import CHECKOUT, QUICK_S, START_S, STEP_S, Live, live, require
from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("vllm")

GROUPS = 4
HOSTS = ("host-1", "host-2", "host-3")
"""As ``tests.netns`` names them."""
LEASE_S = 60
STOPPED = 4
WEIGHTS = "/dev/shm/libra-root"
ELASTIC = ["start", "sync", "verify", "drain", "stop", "join"]
"""The phases of a move on a host where the next process has room beside the old one."""


@dataclass
class Scene:
    """A run on hosts of a network, and what was asked of it meanwhile."""

    run: Live
    net: Network
    #: What every order was answered, by what it was about.
    answers: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)
    #: Files in the weights directory of the hybrid host.
    files: dict[str, list[str]] = field(default_factory=dict)
    #: What status told meanwhile.
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def hybrid(self) -> str:
        """The host that changes sides."""
        return self.net.hosts[1].address

    @property
    def core(self) -> str:
        """The host of the first rank."""
        return self.net.hosts[2].address

    @property
    def slot(self) -> str:
        """The slot that changes sides."""
        return f"{self.hybrid}/0"

    def order(self, split: str) -> None:
        """Have the slot moved; return once the move is under way."""
        number = len(self.moves()) + 1
        done = self.answers[split] = self.run.order(split)
        assert done.returncode == 0, done.stdout + done.stderr
        begun = f"SELECT 1 FROM moves WHERE move = {number}"
        self.run.wait(f"move {number}", lambda: self.run.query(begun), timeout_s=QUICK_S)

    def arrive(self) -> None:
        """Wait until the newest move has ended, well or not."""
        newest = "SELECT 1 FROM moves WHERE ended_at IS NOT NULL AND move = "
        newest += "(SELECT max(move) FROM moves)"
        what = f"end of {self.moves()[-1]}"
        self.run.wait(what, lambda: self.run.query(newest), timeout_s=START_S)

    def more_steps(self, number: int) -> None:
        """Wait for so many further steps."""
        ((step,),) = self.run.query("SELECT coalesce(max(step), 0) FROM steps")
        self.run.wait_step(step + number, timeout_s=STEP_S + QUICK_S)

    def stop(self) -> None:
        """Ctrl-C, and wait."""
        self.run.process.send_signal(signal.SIGINT)
        self.run.process.wait(timeout=STEP_S)

    def moves(self) -> list[tuple[Any, ...]]:
        """(from, to, state, phases, detail) of every move."""
        sql = "SELECT from_role, to_role, state, phases_json, detail FROM moves ORDER BY move"
        return [
            (before, after, state, [phase for phase, _, _ in json.loads(phases)], detail)
            for before, after, state, phases, detail in self.run.query(sql)
        ]

    def shares(self) -> list[tuple[float, dict[str, Any]]]:
        """Every share of the hybrid slot, with the time at which its step was done."""
        return [
            (at, share)
            for at, step in self.run.happened("StepDone")
            for share in step["shares"]
            if share["slot"] == self.slot
        ]


def recipe_text(net: Network, workdir: Path, **training: Any) -> str:
    """The quickstart's job, smaller; its tools take time, so that the cores have some to spare."""
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "moves", "steps": 1000, "lease_s": LEASE_S}
    document["nodes"] = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": sys.executable,
            "workdir": str(workdir / host.name),
            # Hosts that share their cores: threads that wait for each other spin.
            "env": {"OMP_NUM_THREADS": "1"},
            "pool": pool,
        }
        for host, pool in zip(net.hosts, ["rollout", "hybrid", "train"], strict=True)
    ]
    document["environment"]["args"] = {"latency_s": 0.3}
    document["rollout"] |= {"sleep": True, "buckets": [{"name": "all", "max_num_seqs": 16}]}
    document["training"] |= {"groups_per_step": GROUPS, "checkpoint_every": 5, **training}
    document["planner"] = {"kind": "fixed"}
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """What hosts keep between runs: the small model."""
    return workdir_with(models, tmp_path_factory.mktemp("hosts"))


def workdir_with(models: Path, workdir: Path) -> Path:
    """A directory for each host, which keep their models in one."""
    for name in HOSTS:
        (workdir / name).mkdir()
        (workdir / name / "models").symlink_to(models)
    return workdir


@contextmanager
def play(tmp_path_factory, workdir: Path, **training: Any) -> Iterator[Scene]:
    """A run on three hosts that has taken its first steps."""
    base = tmp_path_factory.mktemp("run")
    with (
        network(3, base / "net") as net,
        live(recipe_text(net, workdir, **training), base, net.home) as run,
    ):
        run.wait_step(2, timeout_s=2 * START_S)  # the model is built first
        yield Scene(run, net)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, workdir: Path) -> Iterator[Scene]:
    """A run whose hybrid slot serves, joins the core, helps it, serves and helps again."""
    with play(tmp_path_factory, workdir) as scene:
        scene.answers["nobody serves"] = scene.run.order("rollout=0,gradient=2,train=1")
        with scene.run.frozen("server-0", scene.hybrid):
            scene.run.wait("turn inside", lambda: _holds_a_turn(scene), timeout_s=STEP_S)
            scene.order("rollout=1,gradient=0,train=2")
            scene.answers["while it moves"] = scene.run.order("rollout=1,gradient=1,train=1")
            scene.run.wait("end of grace", lambda: _grace_is_over(scene), timeout_s=QUICK_S)
        scene.arrive()
        scene.more_steps(1)
        for split in ("rollout=1,gradient=1,train=1", "rollout=2,gradient=0", "gradient=1"):
            scene.order(split)
            scene.arrive()
            scene.more_steps(2)
            scene.files[split] = scene.net.files(scene.net.hosts[1], WEIGHTS)
            scene.status[split] = scene.run.libra("status", str(scene.run.run_dir), "--json")
        scene.stop()
        yield scene


def _holds_a_turn(scene: Scene) -> bool:
    """Whether a trajectory has not moved for so long that it must be inside the frozen server."""
    since = time.time() - 3.0
    mine = "turns.group_id = t.group_id AND turns.member = t.member AND turns.attempt = t.attempt"
    return scene.run.query(
        f"SELECT count(*) FROM trajectories t WHERE state = 'running' AND started_at < {since} AND "
        f"NOT EXISTS (SELECT 1 FROM turns WHERE {mine} AND ended_at > {since})"
    ) != [(0,)]


def _grace_is_over(scene: Scene) -> bool:
    timers = [event["name"] for _, event in scene.run.happened("TimerFired")]
    return any(timer.startswith(f"drain {scene.slot}") for timer in timers)


def test_every_ordered_move_goes_through_its_phases(moved):
    told = [(before, after, state, phases) for before, after, state, phases, _ in moved.moves()]
    resized, joined, returned, left = told
    assert resized == ("rollout", "train", "done", ["drain", "stop", "start", "join"])
    assert joined == ("train", "gradient", "done", ["stop", "start", "sync", "verify", "join"])
    assert returned[:3] == ("gradient", "rollout", "done")
    assert returned[3][:3] == ELASTIC[:3]
    # A worker without a share has nothing to drain; one whose shares came too late three times,
    # while vLLM started beside it, has been taken out before.
    assert returned[3][3:] in (["drain", "stop", "join"], ["stop", "join"], ["join"])
    assert left == ("rollout", "gradient", "done", ELASTIC)


def test_status_tells_the_same_moves(moved):
    done = moved.run.libra("status", "--json", str(moved.run.run_dir))
    told = json.loads(done.stdout)
    ways = [(move["from"], move["to"], move["state"]) for move in told["moves"]]
    assert ways == [(before, after, state) for before, after, state, _, _ in moved.moves()]
    for move in told["moves"]:
        phases = move["phases"]
        assert all(a["ended"] == b["began"] for a, b in pairwise(phases))
        assert phases[-1]["ended"] == move["ended_at"]
    assert [plan["cause"] for plan in told["plans"]] == ["start"] + ["order"] * 4


def test_an_order_that_leaves_no_server_is_refused(moved):
    done = moved.answers["nobody serves"]
    assert done.returncode == 2
    assert "rollout=0 is asked for" in done.stderr


def test_an_order_while_a_slot_moves_is_refused_and_names_it(moved):
    done = moved.answers["while it moves"]
    assert done.returncode == 2, done.stdout
    assert moved.slot in done.stderr


def test_a_worker_computes_shares_that_are_used(moved):
    sql = "SELECT started_at, ended_at FROM moves WHERE {} = 'gradient' ORDER BY move"
    joined = [row[0] for row in moved.run.query(sql.format("to_role"))]
    (returned,) = (row[1] for row in moved.run.query(sql.format("from_role")))
    used = [at for at, share in moved.shares() if share["used"]]
    first, second = joined
    assert any(first < at < returned for at in used)
    assert any(second < at for at in used)
    assert not any(returned < at < second for at in used), "a slot that serves has no share"
    for _, share in moved.shares():
        assert share["used"] or share["reason"]


def test_the_others_go_on_during_a_move(moved):
    sql = "SELECT from_role, to_role, started_at, ended_at FROM moves"
    for before, after, began, ended in moved.run.query(sql):
        # Steps are longer than some moves, so that of a server's turns of the others count, too.
        done = ["turns"] if "train" in (before, after) else ["turns", "steps"]
        found = [
            count
            for table in done
            for (count,) in moved.run.query(
                f"SELECT count(*) FROM {table} WHERE ended_at > {began} AND ended_at < {ended}"
            )
        ]
        assert sum(found) > 0, f"nothing was done from {began} to {ended}"


def test_steps_follow_one_another_through_every_move(moved):
    steps = [step for (step,) in moved.run.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))
    assert moved.run.groups_of_steps() == [GROUPS] * len(steps)
    assert moved.run.process.returncode == STOPPED, moved.run.told()


def test_a_resized_core_goes_on_from_a_checkpoint_of_its_last_step(moved):
    incarnations = moved.run.query(
        "SELECT trainer_incarnation, min(version), max(version) FROM versions GROUP BY 1 ORDER BY 1"
    )
    assert [incarnation for incarnation, _, _ in incarnations] == [1, 2, 3]
    for (_, _, last), (_, first, _) in pairwise(incarnations):
        assert first == last, "no step is lost"


def test_every_trajectory_in_flight_at_a_move_ends(moved):
    check_trajectories(moved)


def check_trajectories(scene: Scene) -> None:
    """None failed, none is lost, and the tokens of its turns are those it has.

    What a closed group left behind may still be played when the run ends, and then goes with it.
    """
    ((last,),) = scene.run.query("SELECT max(ended_at) FROM moves")
    lost = (
        "SELECT * FROM trajectories WHERE started_at < {} AND state IS NOT 'finished' AND "
        "(ended_at IS NULL OR ended_at <= (SELECT max(ended_at) FROM steps))"
    )
    assert scene.run.query(lost.format(last)) == []
    rows = scene.run.query(
        "SELECT group_id, member, attempt, generated_tokens, context_tokens, turns "
        "FROM trajectories WHERE state = 'finished'"
    )
    assert rows
    turns: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for *who, prompt, generated in scene.run.query(
        "SELECT group_id, member, attempt, prompt_tokens, generated_tokens FROM turns ORDER BY turn"
    ):
        turns.setdefault(tuple(who), []).append((prompt, generated))
    with Reader(scene.run.run_dir) as reader:
        tokens = {tuple(row[:3]): reader.token_ids(*row[:3]) for row in rows}
    for *who, generated, context, count in rows:
        played = turns[tuple(who)]
        assert len(played) == count, who
        assert sum(tokens for _, tokens in played) == generated, who
        assert sum(map(len, tokens[tuple(who)])) == context, who
        ends = [prompt + tokens for prompt, tokens in played]
        nexts = [prompt for prompt, _ in played[1:]] + [context]
        assert all(end <= begin for end, begin in zip(ends, nexts, strict=True)), who


def test_a_turn_that_outlasts_the_grace_goes_on_elsewhere_with_its_tokens(moved):
    generated = moved.run.happened("TurnGenerated")
    cut = [turn for _, turn in generated if turn["finish_reason"] == "abort"]
    assert {turn["slot"] for turn in cut} == {moved.slot}
    for turn in cut:
        (rest, *_) = [
            other
            for _, other in generated
            if other["trajectory"] == turn["trajectory"] and other["request"] > turn["request"]
        ]
        assert rest["slot"] != moved.slot
        assert rest["prompt_ids"] == turn["prompt_ids"] + turn["token_ids"]


def test_trajectories_of_a_drained_server_go_on_elsewhere(moved):
    sql = "SELECT phases_json, started_at, ended_at FROM moves WHERE from_role = 'rollout'"
    moves = moved.run.query(sql + " ORDER BY move")
    for phases, _, ended in moves:
        drained = {phase: began for phase, began, _ in json.loads(phases)}["drain"]
        still = f"slot = '{moved.slot}' AND queued_at > {drained} AND started_at < {ended}"
        assert moved.run.query(f"SELECT count(*) FROM turns WHERE {still}") == [(0,)]
    # A turn is in the server of the first; when a later one drains, all may wait for a step.
    _, began, ended = moves[0]
    gone = f"moved_from = '{moved.slot}' AND ended_at > {began} AND started_at < {ended}"
    assert moved.run.query(f"SELECT count(*) FROM turns WHERE {gone}") != [(0,)]


def test_every_version_is_verified_wherever_it_is_used(moved):
    (unproved,) = moved.run.query("SELECT count(*) FROM syncs WHERE NOT verified AND gap > 1e-3")
    assert unproved == (0,)
    ((gap,),) = moved.run.query("SELECT max(gap) FROM syncs")
    assert gap < 1e-3
    gaps = [event["gap"] for _, event in moved.run.happened("WorkerSynced")]
    assert gaps
    assert max(gaps) < 1e-3
    gaps = moved.run.query("SELECT max(logprob_gap) FROM steps")
    assert gaps[0][0] < 1e-3


def test_rewards_are_of_finished_trajectories_only(moved):
    check_rewards(moved)


def check_rewards(scene: Scene) -> None:
    rewards = [reward for (reward,) in scene.run.query("SELECT reward FROM steps")]
    assert all(0.0 <= reward <= 1.0 for reward in rewards)
    assert any(rewards)
    scored = "SELECT 1 FROM trajectories WHERE state != 'finished' AND reward IS NOT NULL"
    assert scene.run.query(scored) == []
    unscored = "SELECT 1 FROM groups WHERE state = 'trained' AND reward IS NULL"
    assert scene.run.query(unscored) == []


def test_the_server_that_changed_sides_slept_and_was_woken(moved):
    asleep = [event for _, event in moved.run.happened("ServerAsleep")]
    assert asleep
    assert {event["slot"] for event in asleep} == {moved.slot}
    woken = [event for _, event in moved.run.happened("ServerStarted")]
    numbers = [event["incarnation"] for event in woken if event["slot"] == moved.slot]
    assert set(numbers) & {event["incarnation"] for event in asleep}
    assert "its server is asleep" in moved.status["gradient=1"].stdout


def test_a_worker_that_left_leaves_no_gradients_behind(moved):
    outbox = f"{moved.run.run_dir.name}-{moved.hybrid}"
    assert any(outbox in name for name in moved.files["gradient=1"]), "there it has one"
    assert not any(outbox in name for name in moved.files["rollout=2,gradient=0"])
    for files in moved.files.values():
        versions = {name for name in files if name.rpartition("/")[2].startswith("v0")}
        assert len(versions) <= 4, "two are kept, and others are on their way in and out"


def test_nothing_is_left_on_any_host(moved):
    check_hosts(moved)


def check_hosts(scene: Scene) -> None:
    assert scene.run.processes() == []
    for host in scene.net.hosts:
        assert scene.net.files(host, WEIGHTS) == []
