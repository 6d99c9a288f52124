"""The file from which a controller that was killed is followed by another: ``events.log``.

    head       which code, which recipe: others cannot replay it
    snapshot   the state of the run at that moment
    entries    everything that has happened since, each written before it is acted on

Every record is its length, a keyed BLAKE2b-128 of its number and its bytes (RFC 7693; the key is
the run's token, so only this run's controller can have written it, and none can be moved), and the
bytes. A record is one ``write``: what a killed controller has written the kernel still has, and
``sync`` is for machines that lose power. A torn tail is cut at the last whole record. A new
snapshot begins a new file, which takes the place of the old one when it is on the disk, and when
``settle`` has returned: what the old one would tell again must be where it belongs by then.

Where nothing can be written, the file is removed: one with a hole would tell a wrong story. The
next snapshot begins another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import StateError

EVENTS = "events.log"
_MAC_BYTES = 16
_FRAME = struct.Struct(f"<I{_MAC_BYTES}s")
FIRST_S = 10.0
"""How long a run waits for its first snapshot, or for one that it does not want any more. Chosen: a
disk that takes longer for what is small then is out of order."""
LARGEST_BYTES = 2**32 - 1
"""Most bytes of a record, whose length has four bytes."""


def _mac(key: bytes, number: int, data: bytes) -> bytes:
    salt = number.to_bytes(16, "little")
    return hashlib.blake2b(data, digest_size=_MAC_BYTES, key=key, salt=salt).digest()


def _key(token: str) -> bytes:
    """A key from the run's token, which may be longer than a key can be."""
    return hashlib.blake2b(token.encode(), person=b"libra events").digest()


def _record(key: bytes, number: int, data: bytes) -> bytes:
    if len(data) > LARGEST_BYTES:
        raise OSError(f"a record of {len(data) / 2**30:.1f} GiB is too large")
    return _FRAME.pack(len(data), _mac(key, number, data)) + data


class EventLog:
    """Writes the file. It never raises: ``on_error`` is told once each time it starts failing."""

    def __init__(
        self,
        run_dir: Path,
        token: str,
        on_error: Callable[[StateError], None],
        *,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """``settle`` is called on a thread after a snapshot; a StateError keeps the old file."""
        self._settle = settle
        self._path = run_dir / EVENTS
        self._draft_path = self._path.with_suffix(".new")
        self._key = _key(token)
        self._on_error = on_error
        self._file: int | None = None
        self._number = 0
        self._failing = False
        self._draft: _NewFile | None = None
        #: Bytes of the entries since a snapshot was last tried, and of what stands before them.
        self.entries_bytes = 0
        self.snapshot_bytes = 0

    @property
    def is_beginning(self) -> bool:
        """Whether a thread is writing a new file that is to replace this one."""
        return self._draft is not None

    def begin(self, head: bytes, snapshot: bytes) -> None:
        """Go on in a new file with this snapshot.

        A thread writes it, while entries go to the old file too, which stays until the new one is
        on the disk. The first file is written at once.
        """
        self._drop_draft()
        self._draft = draft = _NewFile(self._draft_path, self._key, head, snapshot, self._settle)
        if self._file is None:
            draft.thread.join(FIRST_S)
            self._take_if_whole()
            if self._file is None:  # what another controller has left is no longer true
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def append(self, entry: bytes) -> None:
        """Write an entry behind those before it; one that cannot be written ends the log."""
        self._take_if_whole()
        if self._draft is not None:
            self._draft.entries.append(entry)
        if self._file is None:
            return
        try:
            self._write(entry)
        except OSError as error:
            self._give_up(error)

    def _write(self, entry: bytes) -> None:
        assert self._file is not None, "begun first"
        record = _record(self._key, self._number, entry)
        _write(self._file, record)
        self._number += 1
        self.entries_bytes += len(record)

    def _take_if_whole(self) -> None:
        if self._draft is not None and not self._draft.thread.is_alive():
            self._take(self._draft)

    def _take(self, draft: _NewFile) -> None:
        """The new file is whole: give it what has come meanwhile, and its name."""
        self._draft, old, number = None, self._file, self._number
        try:
            self._file, self._number, self.entries_bytes = draft.taken(), 2, 0
            for entry in draft.entries:
                self._write(entry)
            os.fdatasync(self._file)
            self._draft_path.rename(self._path)
        except OSError as error:
            draft.drop()
            self._file, self._number, self.entries_bytes = old, number, 0
            if old is None:
                self._give_up(error)
            else:
                self._tell(error)
            return
        if old is not None:
            os.close(old)
        try:
            _sync_directory(self._path.parent)
        except OSError as error:  # what has the name is the new file, and no longer the old one
            self._give_up(error)
            return
        self._failing, self.snapshot_bytes = False, draft.bytes

    def sync(self) -> None:
        """Return when all entries are on the disk."""
        if self._file is None:
            return
        try:
            os.fdatasync(self._file)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file and leave it as it is, for a controller that goes on."""
        self._close()

    def remove(self) -> None:
        """Remove the file of a run that has ended, since nobody can go on from it."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _drop_draft(self) -> None:
        if self._draft is not None:
            self._draft.thread.join(FIRST_S)
            self._draft.drop()
            self._draft = None

    def _close(self) -> None:
        self._drop_draft()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _give_up(self, error: OSError) -> None:
        self._close()
        self.entries_bytes = 0
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._tell(error)

    def _tell(self, error: OSError) -> None:
        first, self._failing = not self._failing, True
        if first:
            self._on_error(
                StateError(
                    f"cannot write {self._path}: {error}; while it cannot be written, a controller "
                    "that is killed is followed from the last checkpoint only",
                    hint=f"free some space: df -h {self._path.parent}",
                )
            )


class _NewFile:
    """A file that a thread writes, and the entries that have come since its snapshot."""

    def __init__(
        self, path: Path, key: bytes, head: bytes, snapshot: bytes, settle: Callable[[], None]
    ) -> None:
        self._settle = settle
        self._path = path
        self._key = key
        self._file: int | None = None
        self._error: OSError | None = None
        self.entries: list[bytes] = []
        self.bytes = 0
        work = (head, snapshot)
        self.thread = threading.Thread(
            target=self._work, args=work, name="libra-event-log", daemon=True
        )
        self.thread.start()

    def _work(self, head: bytes, snapshot: bytes) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            for number, data in enumerate((head, snapshot)):
                record = _record(self._key, number, data)
                self.bytes += len(record)
                _write(self._file, record)
            os.fsync(self._file)
            self._settle()
        except OSError as error:
            self._error = error
        except StateError as error:
            self._error = OSError(str(error))

    def taken(self) -> int:
        """Return the descriptor of the whole file; raises OSError if it could not be written."""
        if self._error is not None:
            raise self._error
        assert self._file is not None, "the thread has ended"
        return self._file

    def drop(self) -> None:
        """Remove the unfinished file, and close it unless its thread still writes."""
        if self._file is not None and not self.thread.is_alive():
            os.close(self._file)
            self._file = None
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class LoggedEvents:
    """What a log holds: its head, its snapshot and the entries since, as bytes."""

    head: bytes
    snapshot: bytes
    entries: list[bytes]


def read_events(run_dir: Path, token: str) -> LoggedEvents:
    """Read the file, to the last whole record.

    Raises:
        StateError: there is none, or its head or its snapshot is damaged or of another token.
    """
    path = run_dir / EVENTS
    try:
        whole = list(_records(path.read_bytes(), _key(token)))
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from error
    if len(whole) < 2:
        raise StateError(f"{path} is damaged, or was written with another token")
    head, snapshot, *entries = whole
    return LoggedEvents(head, snapshot, entries)


def _records(data: bytes, key: bytes) -> Iterator[bytes]:
    at, number = 0, 0
    while at + _FRAME.size <= len(data):
        length, mac = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        record = data[at : at + length]
        if len(record) < length or _mac(key, number, record) != mac:
            return
        yield record
        at, number = at + length, number + 1
