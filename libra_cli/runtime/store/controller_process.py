"""Whether the controller of a run still lives, by its pid, that pid's start time and the boot."""

from __future__ import annotations

import os
from pathlib import Path

from libra_cli.runtime.store.reader import Reader

_STAT_STATE, _STAT_START = 0, 19
"""Fields 3 and 22 of /proc/<pid>/stat, counted after the command's closing parenthesis."""


def boot_id() -> str:
    """The kernel's id of this boot, so that a pid of before a reboot is never taken for alive."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_started(pid: int) -> float | None:
    """The start time of a living process in clock ticks since boot; None if it does not live."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    values = stat.rpartition(")")[2].split()
    return None if values[_STAT_STATE] in "ZX" else float(values[_STAT_START])


def controller_alive(reader: Reader) -> bool:
    """Whether the run's controller still lives. A run of another machine is believed."""
    if reader.meta.get("host") != os.uname().nodename:
        return True
    run = reader.run()
    started = process_started(run.controller_pid)
    return reader.meta.get("boot") == boot_id() and started == run.controller_started
