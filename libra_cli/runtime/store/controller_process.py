"""Whether the controller of a run still lives.

A controller holds the lock of its run directory, and the kernel lets go of it however it dies. So
who finds it held knows that the run goes on, and who finds it free that it does not, whatever the
hosts are called now. What a lock cannot tell is told otherwise:

    a file system without locks, or with   on this machine, since this boot: by the pid and that
    locks of one machine alone (some NFS)  process's start time; from another machine: by whether
                                           anything was written in the last ``SILENCE_S`` seconds
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from libra_cli.runtime.store.reader import Reader

LOCK = "libra.lock"
"""The file in a run directory that its one writer holds."""
SILENCE_S = 60.0
"""A controller that runs writes the counters of its servers every 2 s, and of none every few steps;
one that has written nothing for so long, and holds no lock that can be seen, is taken for dead."""
_STAT_STATE, _STAT_START = 0, 19
"""Fields 3 and 22 of /proc/<pid>/stat, counted after the command's closing parenthesis."""


def boot_id() -> str:
    """The kernel's id of this boot, so that a pid of before a reboot is never taken for alive."""
    return _text("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """What this installation is recognised by whatever it is called; empty if it has no id.

    machine-id(5) asks not to show the id itself, so it is hashed.
    """
    known = _text("/etc/machine-id")
    return hashlib.sha256(f"libra {known}".encode()).hexdigest()[:16] if known else ""


def writer_of_today() -> dict[str, str]:
    """What a journal says of the machine that writes it."""
    return {"host": os.uname().nodename, "boot": boot_id(), "machine": machine_id()}


def process_started(pid: int) -> float | None:
    """The start time of a living process in clock ticks since boot; None if it does not live."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    values = stat.rpartition(")")[2].split()
    return None if values[_STAT_STATE] in "ZX" else float(values[_STAT_START])


def controller_alive(reader: Reader) -> bool:
    """Whether the run's controller still lives, wherever it is."""
    if _locked(reader.run_dir):
        return True
    if controller_is_here(reader):
        run = reader.run()
        started = process_started(run.controller_pid)
        return reader.meta.get("boot") == boot_id() and started == run.controller_started
    return time.time() - (reader.last_written() or 0.0) < SILENCE_S


def controller_is_here(reader: Reader) -> bool:
    """Whether the run was last written on this machine, whatever it was called then."""
    here = writer_of_today()
    known = [key for key in ("boot", "machine") if reader.meta.get(key) and here[key]]
    if any(reader.meta[key] == here[key] for key in known):
        return True
    return "machine" not in known and reader.meta.get("host") == here["host"]


def _locked(run_dir: Path) -> bool:
    """Whether somebody holds the lock; False also where the file system has none."""
    with suppress(OSError):
        lock = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
