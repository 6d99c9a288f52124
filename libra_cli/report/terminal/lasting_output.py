"""Standard output and error of a run, which outlast whoever reads them.

    the terminal hung up (SIGHUP, EIO)   what is written goes to the run's log from then on
    nobody reads the pipe (EPIPE)        the same
    the disk is full (ENOSPC)            the same; what the log cannot take either is lost
    the reader stands still              for ``PATIENCE_S`` it is waited for, then what a pipe does
                                         not take goes to the log, and a drawing is left out

So no write fails, and none holds a run up for long: a terminal behind a connection that has stopped
would otherwise stop the controller, and its hosts would let go of the run. For this, terminals and
pipes are opened once more without blocking, since the flag belongs to all who share a descriptor.
"""

from __future__ import annotations

import io
import os
import select
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PATIENCE_S = 0.5
"""How long a write waits for a reader that stands still; the shortest lease is 5 s."""


class LastingFile(io.RawIOBase):
    """A descriptor that is written to for as long as that is possible, and a log afterwards."""

    def __init__(self, number: int, log: Path) -> None:
        self._number = number
        self._log = log
        self._terminal = os.isatty(number)
        self._descriptor = _without_blocking(number)
        self._stuck = False

    def fileno(self) -> int:
        """Return the descriptor's number, which stays the same when output goes to the log."""
        return self._number

    def isatty(self) -> bool:
        return self._terminal and os.isatty(self._number)

    def hung_up(self) -> None:
        """Give the file up if it was a terminal."""
        if self._terminal:
            self.give_up()

    def writable(self) -> bool:
        """Always true: output that cannot be written is dropped."""
        return True

    def write(self, buffer: ReadableBuffer, /) -> int:
        """Write all of it somewhere, or lose it; never fails."""
        data = bytes(buffer)
        try:
            self._write(data)
        except OSError:
            self._rescue(data)
        return len(data)

    def give_up(self) -> None:
        """Let the log have the descriptor, so that whatever else writes to it writes there."""
        for target in (self._log, Path(os.devnull)):
            try:
                opened = _appending(target)
            except OSError:
                continue
            os.dup2(opened, self._number)
            os.close(opened)
            break
        self._descriptor, self._terminal = self._number, False

    def _rescue(self, data: bytes) -> None:
        drawn = self._terminal
        self.give_up()
        if drawn:
            return  # the live display's, which ends with its terminal
        try:
            self._write(data)
        except OSError:
            return

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
                self._stuck = False
            except BlockingIOError:
                if not self._waited():
                    self._aside(data)
                    return

    def _waited(self) -> bool:
        """Say whether the reader goes on; a reader that stood still is not waited for again."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        goes_on = bool(poll.poll(0 if self._stuck else PATIENCE_S * 1000))
        self._stuck = not goes_on
        return goes_on

    def _aside(self, data: bytes) -> None:
        if self._terminal:
            return
        try:
            log = _appending(self._log)
        except OSError:
            return
        with suppress(OSError), open(log, "wb") as file:
            file.write(data)


def keep_output(log: Path) -> None:
    """Make this process's output last, and a closed terminal (SIGHUP) no end of it.

    Whatever stands in for the streams already, as in tests, stays. A process that was started to
    take no notice of SIGHUP (``nohup``) goes on so.
    """
    lasting = {name: _lasting(getattr(sys, name), log) for name in ("stdout", "stderr")}
    files = [made[1] for made in lasting.values() if made]
    for name, made in lasting.items():
        if made:
            setattr(sys, name, made[0])

    def hung_up(number: int, frame: object) -> None:
        # Whatever takes these for a terminal must not go on drawing into the log.
        os.environ.pop("FORCE_COLOR", None)
        os.environ["TTY_COMPATIBLE"] = "0"
        for file in files:
            file.hung_up()

    if files and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hung_up)


def _lasting(stream: TextIO | None, log: Path) -> tuple[TextIO, LastingFile] | None:
    """A stream in place of this one, and its file; none if it has no descriptor."""
    try:
        number = stream.fileno() if stream is not None else -1
    except (OSError, ValueError):
        return None
    if stream is None or number < 0:
        return None
    stream.flush()
    file = LastingFile(number, log)
    # Nothing that is said may fail for a character that the terminal does not have.
    text = io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, errors="replace", line_buffering=True
    )
    return text, file


def _without_blocking(number: int) -> int:
    """Open a terminal or pipe once more without blocking; what is neither is returned as it is."""
    if not (os.isatty(number) or stat.S_ISFIFO(os.fstat(number).st_mode)):
        return number
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{number}", flags)
    except OSError:
        return number


def _appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
