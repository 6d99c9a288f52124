"""``libra run`` on three real SSH hosts: two serve, one trains, and things go wrong meanwhile.

One long run carries most claims, because starting two vLLM servers on a small machine is what costs
the time. Faults are injected from outside, by what a machine room does: SIGKILL and pulled cables.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
pytest.importorskip("vllm", reason="needs the [cpu] extra")

LIBRA = [sys.executable, "-c", "from libra_cli.cli import main; main()"]
CHECKOUT = Path(__file__).parents[2]
START_S = 400.0
STEP_S = 120.0


@dataclass
class Live:
    """A controller at work, and its run directory."""

    process: subprocess.Popen[str]
    run_dir: Path
    net: Network
    log: Path

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the journal, read as any other program could."""
        uri = f"file:{self.run_dir}/libra.db?mode=ro"
        with sqlite3.connect(uri, uri=True, timeout=10) as database:
            return database.execute(sql).fetchall()

    def wait(self, what: str, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        """Wait for something to become true, unless the controller ends first."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            found = condition()
            if found:
                return found
            if self.process.poll() is not None:
                pytest.fail(f"the controller ended while waiting for {what}:\n{self.told()}")
            time.sleep(0.2)
        pytest.fail(f"no {what} in {timeout_s:.0f} s:\n{self.told()}")

    def wait_step(self, step: int, *, timeout_s: float) -> None:
        self.wait(
            f"step {step}",
            lambda: self.query(f"SELECT 1 FROM steps WHERE step >= {step}"),
            timeout_s=timeout_s,
        )

    def told(self) -> str:
        return self.log.read_text()[-6000:]

    def pid_of(self, process: str, node: str) -> int:
        """The newest pid of a process, as its host's agent numbers it in its own namespace."""
        sql = f"SELECT pid FROM processes WHERE node = '{node}' AND process = '{process}'"
        return int(self.query(sql)[-1][0])


def recipe_text(net: Network, base: Path, *, steps: int) -> str:
    """Two servers and a trainer, each on a host of its own."""
    nodes = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": sys.executable,
            "workdir": str(base / "hosts" / host.name),
            "pool": pool,
        }
        for host, pool in zip(net.hosts, ["rollout", "rollout", "train"], strict=True)
    ]
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {
        "name": "three",
        "steps": steps,
        "directory": str(base / "runs"),
        "lease_s": 30,
    }
    document["nodes"] = nodes
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 32}]
    document["training"] |= {"groups_per_step": 8, "checkpoint_every": 3}
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Iterator[Network]:
    with network(3, tmp_path_factory.mktemp("net")) as made:
        yield made


def start(net: Network, base: Path, *, steps: int) -> Live:
    """The controller, as a user starts it, with the hosts' keys in its home."""
    recipe = base / "three.yaml"
    recipe.write_text(recipe_text(net, base, steps=steps))
    log = base / "libra.log"
    environment = {**os.environ, "HOME": str(net.home), "PYTHONPATH": str(CHECKOUT)}
    environment["TERM"] = "dumb"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*LIBRA, "run", str(recipe)],
            cwd=base,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    live = Live(process, base, net, log)
    found = live.wait(
        "run directory", lambda: sorted((base / "runs").glob("three-*/libra.db")), timeout_s=30
    )
    live.run_dir = found[0].parent
    return live


def libra(live: Live, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(live.net.home), "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(
        [*LIBRA, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def ours(run_dir: Path) -> list[str]:
    """Processes of this run on any host: all hosts' processes are visible from here."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes()
        except OSError:
            continue
        if f"LIBRA_RUN={run_dir.name}\0".encode() in environment:
            found.append((entry.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def kill_on(live: Live, process: str, node: str) -> None:
    """SIGKILL to the leader of a process, found by its markers."""
    markers = [f"LIBRA_RUN={live.run_dir.name}\0".encode(), f"LIBRA_PROCESS={process}\0".encode()]
    markers.append(f"LIBRA_NODE={node}\0".encode())
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if all(marker in environment for marker in markers):
            os.kill(int(entry.name), signal.SIGKILL)
            return
    pytest.fail(f"no {process} on {node}")


@pytest.fixture(scope="module")
def faulty(net, tmp_path_factory) -> Iterator[Live]:
    """A run in which a server, a cable and the trainer fail, in this order."""
    base = tmp_path_factory.mktemp("faulty")
    live = start(net, base, steps=16)
    try:
        live.wait_step(2, timeout_s=START_S)
        kill_on(live, "server-0", net.hosts[0].address)
        live.wait_step(5, timeout_s=STEP_S)
        net.cut(net.hosts[1])
        time.sleep(8)
        net.heal(net.hosts[1])
        live.wait_step(8, timeout_s=STEP_S)
        kill_on(live, "trainer-0", net.hosts[2].address)
        live.wait("end", lambda: live.process.poll() is not None or None, timeout_s=START_S)
        yield live
    finally:
        if live.process.poll() is None:
            live.process.kill()
            live.process.wait()


def test_a_run_with_faults_finishes(faulty):
    assert faulty.process.returncode == 0, faulty.told()
    assert faulty.query("SELECT state, error FROM runs") == [("finished", "")]
    assert [row[0] for row in faulty.query("SELECT step FROM steps ORDER BY step")] == list(
        range(1, 17)
    )


def test_nothing_of_the_run_is_left_on_any_host(faulty):
    assert ours(faulty.run_dir) == []


def test_no_group_is_trained_twice_in_the_kept_timeline(faulty):
    groups = [
        g for (text,) in faulty.query("SELECT groups_json FROM batches") for g in json.loads(text)
    ]
    assert len(groups) == len(set(groups)) == 16 * 8


def test_a_failure_is_recorded_and_never_scored(faulty):
    assert (
        faulty.query("SELECT 1 FROM trajectories WHERE state = 'failed' AND reward IS NOT NULL")
        == []
    )
    unscored = "SELECT 1 FROM groups WHERE state = 'trained' AND reward IS NULL"
    assert faulty.query(unscored) == []


def test_the_killed_server_came_back_and_proved_its_version(faulty):
    rows = faulty.query("SELECT slot, restarts FROM slots WHERE bucket != '' ORDER BY slot")
    assert rows[0][1] == 1
    newest = faulty.query(
        f"SELECT max(version) FROM syncs WHERE slot = '{rows[0][0]}' AND verified"
    )
    assert newest == [(16,)]


def test_the_cable_cost_no_restart(faulty):
    rows = faulty.query("SELECT slot, restarts FROM slots WHERE bucket != '' ORDER BY slot")
    assert rows[1][1] == 0
    lost = faulty.query(
        "SELECT kind FROM events WHERE kind IN ('NodeLost', 'NodeBack') ORDER BY seq"
    )
    assert ("NodeLost",) in lost
    assert ("NodeBack",) in lost


def test_the_trainer_went_on_from_its_checkpoint(faulty):
    epochs = faulty.query("SELECT DISTINCT trainer_epoch FROM versions ORDER BY 1")
    assert epochs == [(1,), (2,)]
    first = faulty.query("SELECT min(version) FROM versions WHERE trainer_epoch = 2")[0][0]
    assert first >= 6, "the checkpoint after step 6 was written before the trainer was killed"


def test_every_version_a_server_served_was_verified(faulty):
    served = faulty.query(
        "SELECT count(*), sum(verified), max(gap) FROM syncs WHERE verified_at > 0"
    )
    count, verified, gap = served[0]
    assert verified >= 16
    assert gap < 1e-3
    assert count - verified <= 3, "only the syncs that a fault cut off may have failed"


def test_rollout_and_trainer_agree_on_log_probabilities(faulty):
    gaps = faulty.query("SELECT logprob_gap FROM steps WHERE logprob_gap IS NOT NULL")
    assert gaps
    assert max(gap for (gap,) in gaps) < 1e-3


def test_status_tells_the_documented_object(faulty):
    done = libra(faulty, "status", "--json", str(faulty.run_dir))
    told = json.loads(done.stdout)
    assert told["run"]["state"] == "finished"
    assert told["step"] == told["weight_version"] == 16
    assert set(told["reward"]) >= {"first", "last"}
    assert {server["verified"] for server in told["servers"]} == {True}
    assert told["trajectories"]["in_flight"] == 0
    assert told["moves"] == []


def test_the_report_is_one_offline_file(faulty):
    text = (faulty.run_dir / "report.html").read_text()
    assert "<svg" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


def test_the_logs_of_a_host_can_be_read_afterwards(faulty):
    node = faulty.net.hosts[2].address
    done = libra(faulty, "logs", node, "trainer-0", "--run", str(faulty.run_dir), "-n", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_an_interrupted_run_checkpoints_leaves_nothing_and_goes_on(net, tmp_path):
    live = start(net, tmp_path, steps=6)
    try:
        live.wait_step(2, timeout_s=START_S)
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(timeout=120) == 4, live.told()
        assert ours(live.run_dir) == []
        ((step, path),) = live.query(
            "SELECT step, checkpoint FROM steps WHERE checkpoint != '' ORDER BY step DESC LIMIT 1"
        )
        assert path
        done = libra_resume(live)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        groups = [
            g for (text,) in live.query("SELECT groups_json FROM batches") for g in json.loads(text)
        ]
        assert len(groups) == len(set(groups)) == 6 * 8
        assert step < 6
        assert ours(live.run_dir) == []
    finally:
        if live.process.poll() is None:
            live.process.kill()
            live.process.wait()


def libra_resume(live: Live) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(live.net.home), "PYTHONPATH": str(CHECKOUT)}
    recipe = next(live.run_dir.parent.parent.glob("three.yaml"))
    return subprocess.run(
        [*LIBRA, "run", str(recipe), "--resume", str(live.run_dir)],
        cwd=recipe.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
