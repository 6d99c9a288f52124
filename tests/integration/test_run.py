"""``libra run`` on three real SSH hosts: two serve, one trains, and things go wrong meanwhile.

One long run carries most claims, because starting two vLLM servers on a small machine is what costs
the time. Faults are injected from outside, by what a machine room does: SIGKILL and pulled cables.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.live import CHECKOUT, START_S, STEP_S, Live, live
from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
pytest.importorskip("vllm", reason="needs the [cpu] extra")

STEPS = 16
GROUPS = 8
LEASE_S = 60


def recipe_text(net: Network, base: Path) -> str:
    """The quickstart's job, on two hosts that serve and one that trains."""
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "three", "steps": STEPS, "lease_s": LEASE_S}
    document["nodes"] = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": sys.executable,
            "workdir": str(base / "hosts" / host.name),
            # Hosts that share their cores: threads that wait for each other spin.
            "env": {"OMP_NUM_THREADS": "1"},
            "pool": pool,
        }
        for host, pool in zip(net.hosts, ["rollout", "rollout", "train"], strict=True)
    ]
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 32}]
    document["training"] |= {"groups_per_step": GROUPS, "checkpoint_every": 3}
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[tuple[Live, Network]]:
    """A run in which a server, a cable and the trainer fail, in this order, played to its end."""
    base = tmp_path_factory.mktemp("run")
    with network(3, base / "net") as net, live(recipe_text(net, base), base, net.home) as started:
        serving, cut, training = (host.address for host in net.hosts)
        started.wait_step(2, timeout_s=START_S)
        started.kill("server-0", serving)
        started.wait_step(5, timeout_s=STEP_S)
        net.cut(net.hosts[1])
        lost = f"SELECT 1 FROM nodes WHERE node = '{cut}' AND state = 'unreachable'"
        started.wait("loss of the host", lambda: started.query(lost), timeout_s=LEASE_S)
        net.heal(net.hosts[1])
        started.wait_step(8, timeout_s=STEP_S)
        started.kill("trainer-0", training)
        started.process.wait(timeout=START_S)
        yield started, net


def test_a_run_with_faults_finishes(run):
    started, _ = run
    assert started.process.returncode == 0, started.told()
    assert started.query("SELECT state, error FROM runs") == [("finished", "")]
    steps = [step for (step,) in started.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, STEPS + 1))


def test_nothing_of_the_run_is_left_on_any_host(run):
    started, _ = run
    assert started.processes() == []


def test_no_group_is_trained_twice_in_the_kept_timeline(run):
    started, _ = run
    groups = started.groups()
    assert len(groups) == len(set(groups)) == STEPS * GROUPS


def test_a_failure_is_recorded_and_never_scored(run):
    started, _ = run
    scored = "SELECT 1 FROM trajectories WHERE state = 'failed' AND reward IS NOT NULL"
    assert started.query(scored) == []
    unscored = "SELECT 1 FROM groups WHERE state = 'trained' AND reward IS NULL"
    assert started.query(unscored) == []


def test_the_killed_server_came_back_and_proved_its_version(run):
    started, net = run
    slot = f"{net.hosts[0].address}/0"
    assert started.query(f"SELECT restarts FROM slots WHERE slot = '{slot}'") == [(1,)]
    newest = f"SELECT max(version) FROM syncs WHERE slot = '{slot}' AND verified"
    assert started.query(newest) == [(STEPS,)]


def test_the_pulled_cable_cost_no_restart(run):
    started, net = run
    slot = f"{net.hosts[1].address}/0"
    assert started.query(f"SELECT restarts FROM slots WHERE slot = '{slot}'") == [(0,)]
    seen = {kind for (kind,) in started.query("SELECT DISTINCT kind FROM events")}
    assert {"NodeLost", "NodeBack"} <= seen


def test_the_trainer_went_on_from_its_checkpoint(run):
    started, _ = run
    incarnations = started.query("SELECT DISTINCT trainer_incarnation FROM versions ORDER BY 1")
    assert incarnations == [(1,), (2,)]
    ((first,),) = started.query("SELECT min(version) FROM versions WHERE trainer_incarnation = 2")
    assert first >= 6, "the checkpoint after step 6 was written before the trainer was killed"


def test_every_version_a_server_served_was_verified(run):
    started, _ = run
    sql = "SELECT count(*), sum(verified), max(gap) FROM syncs"
    ((count, verified, gap),) = started.query(sql)
    assert verified >= STEPS
    assert gap < 1e-3
    assert count - verified <= 3, "only syncs that a fault cut off may have failed"


def test_the_reward_rises_all_the_same(run):
    started, _ = run
    rewards = [reward for (reward,) in started.query("SELECT reward FROM steps ORDER BY step")]
    assert sum(rewards[-5:]) > sum(rewards[:5])


def test_rollout_and_trainer_agree_on_log_probabilities(run):
    started, _ = run
    gaps = started.query("SELECT logprob_gap FROM steps WHERE logprob_gap IS NOT NULL")
    assert gaps
    assert max(gap for (gap,) in gaps) < 1e-3


def test_status_tells_the_documented_object(run):
    started, _ = run
    done = started.libra("status", "--json", str(started.run_dir))
    told = json.loads(done.stdout)
    assert told["run"]["state"] == "finished"
    assert told["step"] == told["weight_version"] == STEPS
    assert set(told["reward"]) >= {"first", "last"}
    assert {server["verified"] for server in told["servers"]} == {True}
    assert {server["version"] for server in told["servers"]} == {STEPS}
    assert told["trajectories"]["in_flight"] == 0
    assert told["moves"] == []


def test_the_report_is_one_offline_file(run):
    started, _ = run
    text = (started.run_dir / "report.html").read_text()
    assert "<svg" in text
    # What an error says may name an address; nothing may be fetched from one.
    assert not re.search(r"""(src|href)=["']https?://|url\(["']?https?://|@import""", text)


def test_the_logs_of_a_host_can_be_read_afterwards(run):
    started, net = run
    node = net.hosts[2].address
    done = started.libra("logs", node, "trainer-0", "--run", str(started.run_dir), "-n", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_token_of_the_run_is_nowhere_to_be_read(run):
    started, _ = run
    tokens = list((started.run_dir.parents[1] / "hosts").rglob("token"))
    for token in tokens:
        assert token.stat().st_mode & 0o077 == 0
    secrets = {token.read_text().strip() for token in tokens}
    told = [started.log, *started.run_dir.glob("*.*"), *_logs(started)]
    for path in told:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path


def _logs(started: Live) -> list[Path]:
    return list((started.run_dir.parents[1] / "hosts").rglob("logs/*.log"))
