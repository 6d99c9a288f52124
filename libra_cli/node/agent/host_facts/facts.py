"""Reads what a host is from /proc, the routing table and nvidia-smi, when a run begins.

Nothing here changes the host. A GPU on which somebody holds memory is reported with the holder's
pid, user and command, so that a person can decide what to do about it.
"""

from __future__ import annotations

import fcntl
import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from libra_cli.node.agent.host_facts import nvidia
from libra_cli.node.processes import proc, remains

SIOCGIFADDR = 0x8915
NOBODY = 65534
"""The uid and gid of root's sandboxes, as in ``envs.sandbox.helper.server``."""
SANDBOX_S = 10.0
"""Seconds that a sandbox may take to start, which takes one of them 20 ms."""
CGROUP = Path("/sys/fs/cgroup")


def facts(
    peers: Sequence[str],
    packages: Sequence[str],
    paths: Sequence[str],
    devices: Sequence[str],
    work: Path,
    weights: Path,
    *,
    sandbox: bool = False,
) -> dict[str, object]:
    """Describe the host: sizes in bytes, ``clock`` in seconds since the epoch.

    Of ``packages`` and ``paths`` the result names those that are there. ``devices`` names the GPUs
    that may be used, by nvidia-smi's index or by UUID; empty: all that are visible. ``work`` and
    ``weights`` are the directories whose free space is measured. Only with ``sandbox`` a sandbox is
    tried.
    """
    routes = [route(peer) for peer in peers]
    first = next((one for one in routes if not one["error"]), None)
    memory, shm = _memory(), shutil.disk_usage(weights)
    return {
        "python": platform.python_version(),
        "hostname": socket.gethostname(),
        "user": getpass.getuser(),
        "markers": _markers(),
        "cpus": len(os.sched_getaffinity(0)),
        "mem_total": memory["MemTotal"],
        "mem_free": memory["MemAvailable"],
        "disk_free": shutil.disk_usage(work).free,
        "shm_free": shm.free,
        "shm_total": shm.total,
        "dev_shm_free": shutil.disk_usage("/dev/shm").free,
        **nvidia.describe(devices),
        "interface": first["interface"] if first else "" if peers else "lo",
        "address": first["address"] if first else "" if peers else "127.0.0.1",
        "routes": routes,
        "interfaces": interfaces(),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "cpp_missing": _cpp_missing(),
        "sandbox_missing": _sandbox_missing() if sandbox else "",
        "rdma": any(Path("/sys/class/infiniband").glob("*")),
        "packages": _versions(packages),
        "requires": _requirements(packages),
        "torch_cuda": _torch_cuda(),
        "paths": [path for path in paths if Path(path).expanduser().exists()],
        "remains": remains.find(work.parents[1], weights),
        "clock": time.time(),
    }


def _cpp_missing() -> str:
    """Return what torch lacks to compile layers for CPUs; empty if nothing."""
    named = os.environ.get("CXX", "g++")
    if shutil.which(named.split()[0] if named.split() else "g++") is None:
        return f"there is no C++ compiler ({named})"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return "" if headers.is_file() else f"there are no headers of Python ({headers})"


def _sandbox_missing() -> str:
    """Return why bubblewrap makes no sandbox here; empty if it does."""
    program = shutil.which("bwrap")
    if program is None:
        return "there is no bwrap"
    within = ("--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/")
    nobody = NOBODY if os.geteuid() == 0 else None
    try:
        done = subprocess.run(
            [program, *within, "--proc", "/proc", "/bin/sh", "-c", ":"],
            capture_output=True,
            text=True,
            timeout=SANDBOX_S,
            check=False,
            user=nobody,
            group=nobody,
            extra_groups=None if nobody is None else [],
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"bwrap does not run: {error}"
    if not done.returncode:
        return ""
    return (done.stderr.strip() or f"bwrap ended with code {done.returncode}").splitlines()[-1]


# -- the network -----------------------------------------------------------------------------------


def route(peer: str) -> dict[str, str]:
    """Return how this host reaches a peer: interface, own address, the peer's address.

    It asks the routing table and sends nothing. ``error`` says why there is no way; empty if one
    is there.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket only looks up the route
            address: str = probe.getsockname()[0]
    except OSError as error:
        told = f"there is no way from here to {peer}: {error}"
        return {"peer": peer, "interface": "", "address": "", "target": "", "error": told}
    names = (name for _, name in socket.if_nameindex())
    interface = next((name for name in names if address in _addresses(name)), "")
    return {
        "peer": peer,
        "interface": interface,
        "address": address,
        "target": str(target[0]),
        "error": "",
    }


def interfaces() -> list[dict[str, object]]:
    """List this host's network interfaces: name, addresses, whether it is up, Mb/s if it tells."""
    return [
        {
            "name": name,
            "up": _operstate(name) in ("up", "unknown"),  # loopback and tunnels never say "up"
            "addresses": _addresses(name),
            "speed_mbit": _speed_mbit(name),
        }
        for _, name in socket.if_nameindex()
    ]


def _operstate(interface: str) -> str:
    with suppress(OSError):
        return Path(f"/sys/class/net/{interface}/operstate").read_text().strip()
    return "unknown"


def _speed_mbit(interface: str) -> int:
    place = Path("/sys/class/net", interface)
    if not (place / "device").exists():  # what a virtual interface says is made up
        return 0
    with suppress(OSError, ValueError):  # some refuse to tell, or say -1
        return max(0, int((place / "speed").read_text()))
    return 0


# -- Python ----------------------------------------------------------------------------------------


def _markers() -> dict[str, str]:
    """What the markers of a requirement ask for (PEP 508)."""
    return {
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "python_full_version": platform.python_version(),
        "platform_machine": platform.machine(),
        "platform_system": platform.system(),
        "sys_platform": sys.platform,
    }


def _distribution(package: str) -> importlib.metadata.Distribution | None:
    """The installed distribution of a package; vLLM's for hosts without GPUs has another name."""
    for name in (package, f"{package}-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.distribution(name)
    return None


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the version of each package that is there, by name; empty where none is told."""
    found = {}
    for package in packages:
        if importlib.util.find_spec(package) is not None:
            distribution = _distribution(package)
            found[package] = distribution.version if distribution else ""
    return found


def _requirements(packages: Sequence[str]) -> dict[str, list[str]]:
    """Return the requirements that each package states of the others, if it states any."""
    name = re.compile(r"[A-Za-z0-9_-]+")
    found = {}
    for package in packages:
        distribution = _distribution(package)
        stated = (distribution.requires if distribution else None) or []
        ours = [one for one in stated if (match := name.match(one)) and match[0] in packages]
        found[package] = [one for one in ours if "extra ==" not in one]
    return {package: stated for package, stated in found.items() if stated}


def _torch_cuda() -> str:
    """The CUDA that torch is built for, such as ``13.0``, without importing it; empty if none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        match = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.M)
        return match[1] if match else ""
    return ""


# -- memory ----------------------------------------------------------------------------------------


def _limit(kind: int) -> int | None:
    """The soft limit that processes started from here inherit; None if there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory() -> Mapping[str, int]:
    """``MemTotal`` and ``MemAvailable`` in bytes, of this host or, if less, of its container."""
    total, free = CGROUP / "memory.max", CGROUP / "memory.current"
    found = _meminfo()
    with suppress(OSError, ValueError):  # no limit reads "max"
        most = int(total.read_text())
        room = max(0, most - int(free.read_text()))
        found["MemTotal"] = min(found["MemTotal"], most)
        found["MemAvailable"] = min(found["MemAvailable"], room)
    return found


def _meminfo() -> dict[str, int]:
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
