"""Reads what a host is from /proc, the routing table and nvidia-smi, once when a run begins.

Nothing here changes the host. A GPU on which somebody holds memory is reported with the holder's
pid, user and command, so that a person can decide what to do about it.
"""

from __future__ import annotations

import csv
import fcntl
import getpass
import importlib.util
import os
import platform
import pwd
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from libra_cli.node.agent import proc
from libra_cli.node.agent.agent_errors import AgentRefused

NVIDIA_SMI_TIMEOUT_S = 20.0
GPU_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.free")
HOLDER_COLUMNS = ("gpu_uuid", "pid")
MIB = 1024**2
SIOCGIFADDR = 0x8915


def facts(
    peers: Sequence[str], packages: Sequence[str], paths: Sequence[str], work: Path, weights: Path
) -> dict[str, object]:
    """Describe the host: sizes in bytes, ``clock`` in seconds since the epoch.

    Of ``packages`` and ``paths`` the result names those that are there. ``work`` and ``weights``
    are the directories whose free space is measured.
    """
    interface, address = route(peers[0]) if peers else ("lo", "127.0.0.1")
    memory = _memory()
    return {
        "python": platform.python_version(),
        "hostname": socket.gethostname(),
        "user": getpass.getuser(),
        "cpus": len(os.sched_getaffinity(0)),
        "mem_total": memory["MemTotal"],
        "mem_free": memory["MemAvailable"],
        "disk_free": shutil.disk_usage(work).free,
        "shm_free": shutil.disk_usage(weights).free,
        "gpus": gpus(),
        "interface": interface,
        "address": address,
        "clock": time.time(),
        "packages": [name for name in packages if importlib.util.find_spec(name) is not None],
        "paths": [path for path in paths if Path(path).expanduser().exists()],
    }


def route(peer: str) -> tuple[str, str]:
    """Return the interface and the own address with which this host reaches a peer.

    It asks the routing table and sends nothing.

    Raises:
        AgentRefused: there is no route to the peer.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket only looks up the route
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise AgentRefused("request", f"there is no way from here to {peer}: {error}") from error
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address in _addresses(name)), ""), address


def gpus() -> list[dict[str, object]]:
    """List this host's GPUs and who holds memory on them; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    listing = _nvidia_smi(f"--query-gpu={','.join(GPU_COLUMNS)}")
    holders = _nvidia_smi(f"--query-compute-apps={','.join(HOLDER_COLUMNS)}")
    return parse_gpus(listing, holders)


def parse_gpus(listing: str, holders: str) -> list[dict[str, object]]:
    """Join nvidia-smi's tables of GPUs and of processes.

    Both are CSV without header and units; memory is in MiB and may be ``[N/A]``.
    """
    held: dict[str, list[dict[str, object]]] = {}
    for row in _rows(holders, len(HOLDER_COLUMNS)):
        uuid, pid = row
        held.setdefault(uuid, []).append(holder(int(pid)))
    return [
        {
            "index": int(index),
            "name": name,
            "mem_total": _mib(total),
            "mem_free": _mib(free),
            "holders": held.get(uuid, []),
        }
        for index, uuid, name, total, free in _rows(listing, len(GPU_COLUMNS))
    ]


def holder(pid: int) -> dict[str, object]:
    """Describe who a process belongs to. A pid from outside a container cannot be looked up."""
    user = ""
    with suppress(OSError, KeyError):
        user = pwd.getpwuid((proc.PROC / str(pid)).stat().st_uid).pw_name
    return {"pid": pid, "user": user, "command": proc.command(pid)}


def _nvidia_smi(query: str) -> str:
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    # Without a driver it exits with an error and prints a sentence where the table should be.
    return done.stdout if done.returncode == 0 else ""


def _rows(table: str, columns: int) -> Iterable[list[str]]:
    rows = csv.reader(table.splitlines(), skipinitialspace=True)
    return ([cell.strip() for cell in row] for row in rows if len(row) == columns)


def _mib(cell: str) -> int:
    return int(cell) * MIB if cell.isdigit() else 0


def _memory() -> dict[str, int]:
    lines = (proc.PROC / "meminfo").read_text().splitlines()
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _addresses(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode())
        found.append(socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
