"""How many trajectories one controller carries, and what they cost it.

    python -m tests.load --trajectories 512 2048 8192 [--seconds 20]

plays that many trajectories at once, each of which talks for ever: real controller, agents, journal
and SSH, two hosts in network namespaces whose servers answer at once, and a trainer that is never
given anything. Prints a row for each number. Needs root.

    turns/s         generations, answered and continued
    CPU ms/turn     of the controller, all its threads
    lag P50, P99    of its event loop: how late a task wakes up that sleeps for 5 ms
    cores           that it keeps busy
    MB, fds         of the controller, at the end
    SSH ms/turn     CPU of the hosts' sshds;  servers' ms/turn: of theirs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.growth import cpu_s, descriptors, rss_mb
from tests.cluster.processes import Role
from tests.cluster.recipe import MODELS, share_models
from tests.live import CHECKOUT
from tests.netns import command_of

START_S = 240.0
SETTLE_S = 3.0
GROUP = 8
LONG = 1 << 20
"""Tokens, and turns, that nobody reaches."""
WATCHED = [sys.executable, str(Path(__file__).with_name("controller.py"))]
COLUMNS = (
    *("trajectories", "turns/s", "CPU ms/turn", "cores", "lag P50 ms", "P99 ms", "max ms"),
    *("   MB", " fds", "threads", "SSH ms/turn", "server ms/turn"),
)


def recipe_of(c: Cluster, trajectories: int) -> dict[str, Any]:
    """Enough groups for that many trajectories at once."""
    document: dict[str, Any] = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "load", "steps": 1, "lease_s": 60, "samples": 0}
    document["nodes"] = c.nodes(*["rollout"] * (len(c.hosts) - 1), "train")
    document["environment"] = {"name": "tests.load.talk:Talk"}
    seats = -(-trajectories // (len(c.hosts) - 1))
    document["model"]["max_len"] = LONG
    document["rollout"] |= {
        "backend": "tests.load.backend:AtOnce",
        "group_size": GROUP,
        "max_turns": LONG,
        "buckets": [{"name": "all", "max_num_seqs": seats}],
    }
    # Groups of two steps may be open at a time.
    document["training"] |= {"groups_per_step": trajectories // GROUP // 2}
    document["training"] |= {"micro_batch_tokens": LONG, "export": {"at_end": []}}
    document["weight_sync"] = {"tolerance": 1e6}  # the servers hold no model
    document["planner"] = {"kind": "fixed"}
    return document


def measure(trajectories: int, seconds: float, directory: Path) -> str:
    """One row."""
    lags = directory / "lags"
    with cluster(3, directory, disk_mb=512) as c:
        share_models(c, MODELS.expanduser())
        run = c.run(recipe_of(c, trajectories), command=[*WATCHED, str(lags)])
        everybody = f"SELECT 1 WHERE {trajectories} <= (SELECT count(*) FROM trajectories)"
        run.wait("trajectories", lambda: run.query(everybody), timeout_s=START_S)
        time.sleep(SETTLE_S)
        before, skip = _reading(c), lags.stat().st_size
        time.sleep(seconds)
        after = _reading(c)
        row = _row(trajectories, run.process.pid, before, after, lags.read_bytes()[skip:])
        run.end()
    return row


def _row(
    trajectories: int, pid: int, before: tuple[float, ...], after: tuple[float, ...], lags: bytes
) -> str:
    turns, wall_s, cpu, ssh, servers = (b - a for a, b in zip(before, after, strict=True))
    late = sorted(1e3 * lag for lag in array("d", lags))
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    cells = [
        *(f"{trajectories}", f"{turns / wall_s:.0f}", f"{1e3 * cpu / max(1.0, turns):.2f}"),
        f"{cpu / wall_s:.2f}",
        *(f"{late[int(share * (len(late) - 1))]:.1f}" for share in (0.5, 0.99, 1.0)),
        *(f"{rss_mb(pid):.0f}", f"{descriptors(pid)}", f"{threads}"),
        *(f"{1e3 * part / max(1.0, turns):.2f}" for part in (ssh, servers)),
    ]
    return _aligned(cells)


def _aligned(cells: list[str]) -> str:
    return "  ".join(cell.rjust(len(name)) for name, cell in zip(COLUMNS, cells, strict=True))


def _reading(c: Cluster) -> tuple[float, ...]:
    """Turns, the time, and CPU seconds of the controller, the sshds and the servers."""
    assert c.controller is not None
    sql = "SELECT count(*) FROM events WHERE kind = 'TurnGenerated'"
    ((turns,),) = c.controller.query(sql)
    everything = [pid for host in c.hosts for pid in c.net.machine(host).pids()]
    sshd = [cpu_s(pid) for pid in everything if command_of(pid).startswith("sshd")]
    servers = [cpu_s(one.pid) for one in c.processes(Role.SERVER)]
    return turns, time.monotonic(), cpu_s(c.controller.process.pid), sum(sshd), sum(servers)


def main() -> None:
    """Measure every number of trajectories."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    base = given.directory or Path(tempfile.mkdtemp(prefix="libra-load-"))
    sys.stdout.write("  ".join(COLUMNS) + "\n")
    for number in given.trajectories:
        sys.stdout.write(measure(number, given.seconds, base / str(number)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
