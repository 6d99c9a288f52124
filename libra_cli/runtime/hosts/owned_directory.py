"""A private directory among the temporary files, which no process leaves behind for good.

A process that is killed removes nothing. So each directory has a file that its process keeps
locked, and whoever makes the next one of its kind removes those of the same user whose lock is
free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK = "owner.lock"


class OwnedDirectory:
    """A directory that only this user can enter; it goes with ``remove``, or after this process."""

    def __init__(self, kind: str) -> None:
        """Make one, and remove those of this kind, a word, that killed processes have left."""
        prefix = f"libra-{kind}-"
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = _lock(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(directory: Path) -> int | None:
    """Mark a directory as one of this process; None where files cannot be locked."""
    made = directory / f"{LOCK}.new"
    lock = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    made.rename(directory / LOCK)  # nobody finds it while it is not locked
    return lock


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for directory in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # another process may remove it at the same time
            if directory.lstat().st_uid == os.geteuid() and not directory.is_symlink():
                _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory whose process is gone.

    Raises:
        OSError: it has no lock, or its process holds that.
    """
    lock = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(lock)
