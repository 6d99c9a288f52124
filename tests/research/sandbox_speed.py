"""How fast sandboxes start and run commands, how many there can be, and what each takes.

``python -m tests.research.sandbox_speed [SANDBOXES]`` prints a table: seconds from a call to its
return for a start, a command (``true``), a command in a shell that stays and a file; commands a
second by several threads in as many sandboxes; then SANDBOXES at once, with the memory and the
processes of each: what all of their processes have for themselves, by the kernel's count (Pss).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from libra_cli.envs.sandbox.sandbox import Sandbox, open_sandbox
from libra_cli.envs.sandbox.spec import SandboxSpec

TIMES = 300
THREADS = 4
RATE_S = 5.0
KIB = 1024


def main(many: int) -> None:
    """Measure everything."""
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    sys.stdout.write("                     P50 ms   P99 ms\n")
    opened: list[Sandbox] = []
    told("start", lambda: opened.append(open_sandbox(SandboxSpec())))
    sandbox = opened[0]
    told("command", lambda: sandbox.run("true"))
    shell = sandbox.shell()
    told("command in a shell", lambda: shell.run("true"))
    told("write of 1 kB", lambda: sandbox.write("file", b"x" * KIB))
    told("end", lambda: opened.pop().close())
    sandboxes = [open_sandbox(SandboxSpec()) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as threads:
        done = sum(threads.map(as_many, sandboxes))
    sys.stdout.write(f"{done / RATE_S:.0f} commands a second by {THREADS} threads\n")
    for one in sandboxes:
        one.close()
    at_once(many)


def told(what: str, do: Callable[[], object]) -> None:
    """Do something many times, and print how long it takes."""
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - began)
    median, last = (1000 * float(np.percentile(seconds, share)) for share in (50, 99))
    sys.stdout.write(f"{what:20} {median:7.1f}  {last:7.1f}\n")


def as_many(sandbox: Sandbox) -> int:
    """Run commands for ``RATE_S`` seconds, and return how many they were."""
    number, ends = 0, time.monotonic() + RATE_S
    while time.monotonic() < ends:
        assert sandbox.run("true").code == 0
        number += 1
    return number


def at_once(many: int) -> None:
    """Have many sandboxes at the same time, and print what they take."""
    before = set(pids())
    began = time.perf_counter()
    sandboxes = [open_sandbox(SandboxSpec()) for _ in range(many)]
    took = time.perf_counter() - began
    found = [pid for pid in pids() if pid not in before]
    memory = sum(map(pss_kib, found))
    sys.stdout.write(
        f"{many} at once, opened in {took:.1f} s: {len(found) / many:.1f} processes and "
        f"{memory / many / KIB:.1f} MiB each\n"
    )
    for one in sandboxes:
        one.close()


def pids() -> list[str]:
    """The processes of this machine."""
    return [name for name in os.listdir("/proc") if name.isdigit()]


def pss_kib(pid: str) -> int:
    """KiB of a process, with its part of what it shares; 0 once it has ended. Needs root."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
