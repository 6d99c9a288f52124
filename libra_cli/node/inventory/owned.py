"""Lists what runs of this user own on one host, and who else holds its GPUs. Changes nothing.

A process belongs to a run if it carries the run's marker. The lease is asked of the agent, which a
question of this kind does not renew. Standard library only.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from libra_cli.node.agent.host_facts.nvidia import NVIDIA_SMI_S, holder
from libra_cli.node.processes import proc
from libra_cli.node.processes.stop import SOCKET

ANSWER_S = 3.0


def owned(runs: Path) -> dict[str, Any]:
    """List processes of any run by pid, and the GPU memory that others hold.

    ``since`` is in seconds since the epoch, ``gpu_mib`` in MiB; ``lease`` is by ``run/node`` and in
    seconds, and has no entry where no agent answers.
    """
    memory = gpu_memory()
    rows = [_row(status.identity, memory) for status in proc.statuses() if status.state not in "ZX"]
    ours = [row for row in rows if row is not None]
    places = {(str(row["run"]), str(row["node"])) for row in ours}
    leases = {f"{run}/{node}": _lease(runs / run / node) for run, node in sorted(places)}
    pids = {row["pid"] for row in ours}
    others = [
        {**holder(str(pid)), "gpu_mib": mib} for pid, mib in memory.items() if pid not in pids
    ]
    return {
        "processes": ours,
        "leases": {place: lease for place, lease in leases.items() if lease},
        "others": [{name: value for name, value in one.items() if name != "run"} for one in others],
    }


def _row(identity: proc.ProcessIdentity, memory: dict[int, int]) -> dict[str, object] | None:
    marker = proc.marker_of(identity.pid)
    if marker is None or identity.pid == os.getpid():
        return None
    run, node, process = marker
    return {
        "run": run,
        "node": node,
        "process": process,
        "pid": identity.pid,
        "since": _since(identity.started),
        "gpu_mib": memory.get(identity.pid, 0),
    }


def _since(started: int) -> float:
    uptime_s = float((proc.PROC / "uptime").read_text().split()[0])
    return time.time() - uptime_s + started / os.sysconf("SC_CLK_TCK")


def gpu_memory() -> dict[int, int]:
    """MiB of GPU memory by pid, on all GPUs together; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    argv = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
        return parse_memory(done.stdout if done.returncode == 0 else "")
    return {}


def parse_memory(table: str) -> dict[int, int]:
    """Sum nvidia-smi's rows of pid and MiB, which may be ``[N/A]``."""
    found: dict[int, int] = {}
    for row in csv.reader(table.splitlines(), skipinitialspace=True):
        if len(row) == 2 and row[0].isdigit():
            mib = int(row[1]) if row[1].strip().isdigit() else 0
            found[int(row[0])] = found.get(int(row[0]), 0) + mib
    return found


def _lease(run_dir: Path) -> dict[str, float]:
    """What the agent of a run directory says of its lease; empty if it does not answer."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        os.chdir(run_dir)  # the path of a socket may be short only
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(SOCKET)
            connection.sendall(b'{"id": 1, "op": "lease"}\n')
            with connection.makefile("rb") as lines:
                result = json.loads(lines.readline())["result"]
        return {name: float(result[name]) for name in ("left_s", "heard_s")}
    return {}
