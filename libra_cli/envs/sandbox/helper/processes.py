"""Which processes a command has started, and how all of them are ended.

They are looked for from within the sandbox, whose /proc shows no others: what descends from the
command, and what was started since and has lost its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from libra_cli.envs.sandbox.helper.place import KEEPER, Enclosure

_INIT = 1
_PASSES = 50
_PASS_S = 0.02


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    session: int
    started: int
    zombie: bool


def now_in_ticks() -> int:
    """The time that a process which started now would have as its start, in clock ticks."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def end_all(place: Enclosure, root: int, since: int, *, spare_root: bool = False) -> bool:
    """Kill what the command ``root`` has started since a tick; says whether all of it is gone."""

    def kill() -> int:
        for _ in range(_PASSES):
            if not _signal(place, root, since, signal.SIGKILL, spare_root):
                return 0
            time.sleep(_PASS_S)
        return 1

    return _within(kill) == 0


def interrupt(place: Enclosure, root: int, since: int) -> None:
    """Send SIGINT to the command ``root`` and to what it has started since a tick."""
    _within(lambda: _signal(place, root, since, signal.SIGINT, spare_root=False) * 0)


def _within(do: Callable[[], int]) -> int:
    """Do something in a process that is forked into the sandbox; returns its exit code."""
    try:
        pid = os.fork()
    except OSError:  # they have all the processes that there may be
        return 2
    if pid == 0:
        code = 2
        try:
            code = do()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _signal(place: Enclosure, root: int, since: int, number: int, spare_root: bool) -> int:
    """Send a signal to each, and return how many there are."""
    processes = _all()
    found = [
        pid
        for pid, one in processes.items()
        if not one.zombie and pid != os.getpid() and not (spare_root and pid == root)
        if _belongs(pid, processes, root, since, place.closed)
    ]
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return len(found)


def _belongs(pid: int, processes: dict[int, _Process], root: int, since: int, closed: bool) -> bool:
    first = processes[pid]
    if pid == root or first.started < since:
        return pid == root
    seen = 0
    while pid in processes and pid not in (_INIT, KEEPER, root) and seen < len(processes):
        pid, seen = processes[pid].parent, seen + 1
    orphaned = closed and pid == _INIT and first.parent != 0
    return pid == root or first.session == root or orphaned


def _all() -> dict[int, _Process]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent, _, session, *rest = file.read().rpartition(b")")[2].split()
            zombie = state in (b"Z", b"X")
            found[int(name)] = _Process(int(parent), int(session), int(rest[15]), zombie)
    return found
