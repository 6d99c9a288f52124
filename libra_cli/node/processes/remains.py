"""What dead runs have left in the directory of weight versions, which is usually memory.

A run is dead here if its agent's lock is free and no process names it. Only a run whose run
directory is in the same work directory can be judged, and only that user's: of all others nothing
is listed, and nothing is ever removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from libra_cli.node.processes import proc

LOCK = "agent.lock"


def find(runs: Path, weights: Path) -> list[dict[str, object]]:
    """List the directories beside ``weights`` whose runs, of ``runs``, are dead: name and bytes."""
    with suppress(OSError):
        beside = [one for one in weights.parent.iterdir() if one.is_dir() and one != weights]
        dead = [one for one in beside if _is_ours(one) and is_dead(runs / one.name)]
        return [{"name": one.name, "bytes": _size(one)} for one in sorted(dead)]
    return []


def remove(runs: Path, weights: Path, names: Sequence[str]) -> list[str]:
    """Remove those of the named directories that are still dead runs'; return their names."""
    dead = {str(one["name"]) for one in find(runs, weights)}
    gone = [name for name in names if name in dead]
    for name in gone:
        shutil.rmtree(weights.parent / name, ignore_errors=True)
    return gone


def _is_ours(directory: Path) -> bool:
    return not directory.is_symlink() and directory.lstat().st_uid == os.getuid()


def is_dead(run: Path) -> bool:
    """Say whether a run's directory has locks that nobody holds, and no process is of the run."""
    locks = list(run.glob(f"*/{LOCK}"))
    if not locks or any(_is_held(lock) for lock in locks):
        return False
    return all(proc.run_of(one.identity.pid) != run.name for one in proc.statuses())


def _is_held(lock: Path) -> bool:
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _size(directory: Path) -> int:
    total = 0
    for one in directory.rglob("*"):
        with suppress(OSError):
            total += one.lstat().st_size
    return total
