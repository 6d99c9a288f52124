"""What a run takes as time goes by: a row a minute."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.cluster import Cluster
from tests.cluster.processes import Role

if TYPE_CHECKING:
    from tests.cluster.chaos import Result

EVERY_S = 60.0
COLUMNS = (
    "minute",
    "faults",
    "steps",
    "controller MB",
    "controller CPU s",
    "descriptors",
    "threads",
    "agent MB",
    "agent descriptors",
    "database MB",
    "run dir MB",
    "host disk MB",
    "host logs MB",
    "host memory MB",
)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Growth:
    """Writes the rows until it is left; without a file, none."""

    def __init__(self, c: Cluster, result: Result, path: Path | None) -> None:
        self._c = c
        self._result = result
        self._path = path
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> None:
        if self._path is not None:
            self._path.write_text("\t".join(COLUMNS) + "\n")
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._path is not None:
            self._thread.join()

    def _work(self) -> None:
        assert self._path is not None
        while not self._stop.wait(EVERY_S):
            try:
                row = self._row()
            except Exception as error:  # noqa: BLE001 - a host may be away at this moment
                row = [repr(error)]
            with self._path.open("a") as file:
                file.write("\t".join(row) + "\n")

    def _row(self) -> list[str]:
        assert self._c.controller is not None
        pid, run_dir = self._c.controller.process.pid, self._c.controller.run_dir
        agents = [one.pid for one in self._c.processes(Role.AGENT)]
        disks = [self._c.net.machine(host).path(host.disk) for host in self._c.hosts]
        memory = [self._c.net.machine(host).path("/dev/shm") for host in self._c.hosts]
        logs = [path for disk in disks for path in disk.glob("runs/*/*/**/*.log*")]
        numbers = (
            (time.monotonic() - self._began) / 60,
            len(self._result.injections),
            self._c.controller.step(),
            rss_mb(pid),
            cpu_s(pid),
            descriptors(pid),
            len(os.listdir(f"/proc/{pid}/task")),
            max(map(rss_mb, agents), default=0),
            max(map(descriptors, agents), default=0),
            _size(run_dir.glob("libra.db*")),
            _size(run_dir.rglob("*")),
            max(_size(path for path in disk.glob("runs/**/*")) for disk in disks),
            _size(logs),
            max(_size(path.rglob("*")) for path in memory),
        )
        return [f"{number:.1f}".removesuffix(".0") for number in numbers]


def rss_mb(pid: int) -> float:
    """Resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all threads, kernel included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _size(paths: Iterable[Path]) -> float:
    """MB; what vanishes meanwhile counts nothing."""
    total = 0
    for path in paths:
        try:
            if not path.is_symlink() and path.is_file():
                total += path.stat().st_size
        except OSError:
            continue
    return total / 1e6
