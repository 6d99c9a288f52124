"""The controller's own log: ``controller.log`` in the run directory, rotated, its owner's alone.

It has what libra's modules log, warnings of its libraries, and what Python would otherwise print or
drop: exceptions in asyncio's callbacks, in threads, and where nothing could be raised. An error is
told to the user as well, once for each place it comes from. Secrets are masked, and nothing that a
terminal obeys is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.config.text import one_line, printable

FILE = "controller.log"
MOST_BYTES = 8_000_000
BACKUPS = 2
"""Older files that are kept beside it, so 24 MB in all."""

_OURS = ("libra_cli", "asyncio")
"""Whose errors the user is told; other packages' are often no errors of the run."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def controller_log(
    run_dir: Path, *, note: Callable[[str], None], mask: Callable[[str], str] = str
) -> Iterator[None]:
    """Log to the run directory while the context lasts; ``note`` tells the user of errors.

    A log that cannot be written is no error of the run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [_Told(run_dir / FILE, note, mask)]
    with contextlib.suppress(OSError):
        handlers.append(_PrivateFile(run_dir / FILE, mask))
    root, ours = logging.getLogger(), logging.getLogger("libra_cli")
    level = ours.level
    ours.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = _unraisable, _in_thread
    try:
        yield
    except LibraError:
        raise
    except Exception:
        _log.exception("the controller ends by an error that nobody expected")
        raise
    finally:
        sys.unraisablehook, threading.excepthook = hooks
        ours.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def log_of_loop(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio could raise nowhere (an exception handler of its loops)."""
    _log.error("asyncio: %s", context.get("message"), exc_info=context.get("exception"))


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    if found.exc_value is not None:
        _log.error("%s in %r", found.err_msg or "ignored", found.object, exc_info=found.exc_value)


def _in_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_value is not None and not isinstance(found.exc_value, SystemExit):
        name = found.thread.name if found.thread else "?"
        _log.error("the thread %s ended", name, exc_info=found.exc_value)


class _SafeFormatter(logging.Formatter):
    def __init__(self, mask: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        return printable(self._mask(super().format(record)))


class _PrivateFile(RotatingFileHandler):
    def __init__(self, path: Path, mask: Callable[[str], str]) -> None:
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=BACKUPS, encoding="utf-8")
        self.setFormatter(_SafeFormatter(mask))

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600),
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Drop the line in silence: that a disk is full, the journal tells."""


class _Told(logging.Handler):
    """Tells the user of errors, once for each line of code and kind of exception."""

    def __init__(self, path: Path, note: Callable[[str], None], mask: Callable[[str], str]) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self._note = note
        self._mask = mask
        self._told: set[tuple[object, ...]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        kind, _, trace = record.exc_info or (None, None, None)
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ()
        key = (record.name, record.lineno, kind, *place)
        if key in self._told or not record.name.startswith(_OURS):
            return
        self._told.add(key)
        with contextlib.suppress(Exception):
            said = one_line(self._mask(record.getMessage()))
            self._note(f"{said} (more in {self._path})")
