"""Opens the database of a run to write it: one writer, one file, on the file systems there are.

Readers never wait for a writer in WAL mode, which needs memory shared between processes. File
systems of a network have none, and those of some containers neither: there the database is opened
with a rollback journal, where a reader and the writer may wait a moment for one another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from pathlib import Path

from libra_cli import __version__
from libra_cli.config.errors import StateError
from libra_cli.runtime.store.controller_process import LOCK, writer_of_today
from libra_cli.runtime.store.schema import check_format, migrate

CLOSE_DEADLINE_S = 2.0
_LOCK_TRIES, _LOCK_RETRY_S = 4, 0.02
_MOUNTS = Path("/proc/mounts")
_SHARED = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "9p",
    "afs",
    "glusterfs",
)
"""How the types of file systems begin that several machines write."""
_ELSEWHERE = "name a directory on a disk of this machine: run.directory in the recipe"


def only_writer(run_dir: Path) -> int:
    """Hold ``libra.lock``; the kernel lets go of it when the controller dies, however it dies.

    Raises:
        StateError: another holds it, or the directory cannot be written or locked.
    """
    try:
        lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(
            f"cannot write {run_dir}: {error.strerror}", hint=hint_of(error, run_dir)
        ) from error
    try:
        _hold(lock)
    except BlockingIOError as error:
        os.close(lock)
        raise StateError(
            f"{run_dir}: another libra is writing this run",
            hint=f"libra stop {run_dir}",
        ) from error
    except OSError as error:
        os.close(lock)
        raise StateError(
            f"{run_dir} is where files cannot be locked: {error.strerror}", hint=_ELSEWHERE
        ) from error
    return lock


def _hold(lock: int) -> None:
    """Take the lock; whoever only asks whether it is held has it for a moment."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_RETRY_S)
    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database, which is made or migrated first.

    Raises:
        StateError: it cannot be opened, or is of a newer libra.
    """
    try:
        if not path.exists():
            _create(path)
        if _is_shared(path):
            return _opened(path, "DELETE")
        try:
            return _opened(path, "WAL")
        except sqlite3.OperationalError:
            return _opened(path, "DELETE")
    except (sqlite3.Error, OSError) as error:
        raise StateError(
            f"cannot open {path}: {error}", hint=hint_of(error, path.parent)
        ) from error


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    connection = _connected(path)
    try:
        check_format(connection, path)
        if connection.execute(f"PRAGMA journal_mode={mode}").fetchone()[0] != mode.lower():
            raise sqlite3.OperationalError(f"no journal mode {mode} here")
        connection.execute("PRAGMA synchronous=NORMAL")
        _make_ours(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_shared(path: Path) -> bool:
    """Whether the file system of a path is one of a network, as ``/proc/mounts`` names it."""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    place = f"{path.resolve()}/"
    above = [
        (len(where), kind)
        for _, where, kind, *_ in (mount for mount in mounts if len(mount) > 2)
        if place.startswith(f"{where.rstrip('/')}/")
    ]
    return bool(above) and max(above)[1].startswith(_SHARED)


def _create(path: Path) -> None:
    """Create the file under another name until its tables are in it: who finds it can read it."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)  # its -wal and -shm get the same mode
    with contextlib.closing(_connected(new)) as connection:
        _make_ours(connection)
    new.rename(path)


def _make_ours(connection: sqlite3.Connection) -> None:
    """Bring the file to this libra's schema, and say who writes it from now on."""
    writer = {"libra": __version__, **writer_of_today()}
    connection.execute("BEGIN IMMEDIATE")
    migrate(connection)
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", writer.items())
    connection.execute("COMMIT")


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)


def fold(connection: sqlite3.Connection) -> None:
    """Leave WAL mode, which removes -wal and -shm. A reader holds it up for a moment only; if one
    stays, the files stay beside the database and every reader still understands them."""
    deadline = time.monotonic() + CLOSE_DEADLINE_S
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    while time.monotonic() < deadline:
        try:
            if connection.execute("PRAGMA journal_mode=DELETE").fetchone()[0] == "delete":
                return
        except sqlite3.Error:
            time.sleep(0.05)


def hint_of(error: BaseException, directory: Path) -> str:
    """What to type next, by what the system says of a file that cannot be written."""
    said = str(error).lower()
    if "locked" in said or "protocol" in said:
        return f"see who holds it: fuser -v {directory}/*"
    if "readonly" in said or "read-only" in said or "denied" in said:
        return f"make it writable for you: ls -ld {directory}"
    return f"free some space, or mend the disk: df -h {directory}; dmesg | tail"
