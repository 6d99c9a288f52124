"""Removes what old runs have left on one host, by rules. Never anything of a live run.

A run is live while a lock of an agent of it is held or a process carries its marker. Standard
library only.

    what                                    is removed
    logs and settings of a dead run         when nothing in it was written for ``days``
    checkpoints of a dead run               by the same rule, all but the last whole one and what is
                                            newer, and unfinished ones; with ``everything`` all.
                                            What ``libra export`` reads beside that one stays too
    code in a work directory                unused for ``days``, and no process uses it
    code that was put aside as damaged      at once, unless a process uses it
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from libra_cli.node.processes import proc
from libra_cli.node.processes.remains import is_dead

DAYS = 14.0
DAY_S = 86400.0
CHECKPOINT = re.compile(r"step-(\d+).*")
COMPLETE = "checkpoint.json"
"""What a checkpoint has only when it is whole."""
KEPT = ("checkpoints", "agent.lock", "trainer.json")
"""What stays beside a last whole checkpoint; ``libra export`` reads in ``trainer.json`` which base
model it is of, and the number format."""


@dataclass(frozen=True, slots=True)
class StaleArtifact:
    """Something that may be removed, and by which rule."""

    path: str
    why: str
    bytes: int
    run: str = ""
    """The directory of the run that it is of; empty for code."""


def old_things(
    work: Path, *, days: float = DAYS, run: str = "", everything: bool = False
) -> list[StaleArtifact]:
    """What the rules remove in a work directory; only of one ``run``, if it is named."""
    before = time.time() - days * DAY_S
    found = [] if run else [*_old_code(work / "code", before)]
    for directory in sorted((work / "runs").glob("*")):
        named = run in ("", directory.name)
        if named and _is_ours(directory) and is_dead(directory):
            of_run = _old_run(directory, before, everything=everything)
            found += [replace(one, run=str(directory)) for one in of_run]
    return found


def remove_old_code(work: Path) -> list[StaleArtifact]:
    """Remove code that nobody has used for ``DAYS``: the bound that every run keeps."""
    return remove([*_old_code(work / "code", time.time() - DAYS * DAY_S)])


def remove(things: list[StaleArtifact]) -> list[StaleArtifact]:
    """Remove artifacts that nobody wants, and return those that are gone.

    Terabytes take a while, in which a run may have been resumed and code been used again: that is
    asked of each just before it goes.
    """
    gone = []
    for thing in things:
        path = Path(thing.path)
        if _is_wanted(thing):
            continue
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            gone.append(thing)
    return gone


def _is_wanted(thing: StaleArtifact) -> bool:
    if thing.run:
        return not is_dead(Path(thing.run))
    return os.path.realpath(thing.path) in _code_in_use()


def _old_run(directory: Path, before: float, *, everything: bool) -> Iterator[StaleArtifact]:
    if _newest(directory) > before:
        return
    kept = [one for one in directory.glob("*/checkpoints/*") if CHECKPOINT.fullmatch(one.name)]
    whole = [one for one in kept if (one / COMPLETE).exists()]
    if everything or not whole:
        yield _thing(directory, f"a dead run, {'all of it' if everything else 'no checkpoint'}")
        return
    # Of a sharded one every node has a part, and nodes may share a disk.
    newest = max(whole, key=_written)
    for one in sorted(kept):
        if one.name != newest.name and _written(one) < _written(newest):
            yield _thing(one, "not the last checkpoint of a dead run")
    for one in sorted(directory.glob("*/checkpoints/.*")):
        yield _thing(one, "an unfinished checkpoint of a dead run")
    for node in sorted(directory.glob("*/*")):
        if node.name not in KEPT:
            yield _thing(node, "of a dead run")


def _old_code(code: Path, before: float) -> Iterator[StaleArtifact]:
    used = _code_in_use()
    for one in sorted(code.glob("*")):
        if not _is_ours(one) or os.path.realpath(one) in used:
            continue
        if ".damaged-" in one.name:
            yield _thing(one, "damaged code")
        elif one.stat().st_mtime < before:
            yield _thing(one, "code that no run used lately")


def _code_in_use() -> set[str]:
    """The directories that processes of this user import from, by whatever path they name them."""
    found: set[str] = set()
    for status in proc.statuses():
        with suppress(OSError):
            block = (proc.PROC / str(status.identity.pid) / "environ").read_bytes()
            for entry in block.decode(errors="replace").split("\0"):
                name, _, value = entry.partition("=")
                paths = value.split(":") if name == "PYTHONPATH" else ()
                found |= {os.path.realpath(path) for path in paths if os.path.isabs(path)}
    return found


def _written(checkpoint: Path) -> tuple[float, str]:
    return checkpoint.stat().st_mtime, checkpoint.name


def _newest(directory: Path) -> float:
    """When a file in it was last written; a directory's time also tells of what was removed."""
    files = (one for one in directory.rglob("*") if not one.is_dir())
    return max((one.lstat().st_mtime for one in files), default=directory.stat().st_mtime)


def _is_ours(directory: Path) -> bool:
    return not directory.is_symlink() and directory.lstat().st_uid == os.getuid()


def _thing(path: Path, why: str) -> StaleArtifact:
    sizes = (one.lstat().st_size for one in path.rglob("*")) if path.is_dir() else ()
    return StaleArtifact(str(path), why, sum(sizes) or path.lstat().st_size)
