"""A command that takes minutes: what it says is kept, and told now and then."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LONGEST_S = 3600
"""Seconds that a command may take, also on a busy machine."""
TELL_S = 30
"""Seconds between two lines about a command that goes on."""

Say = Callable[[str], None]


def run_watched(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    log: Path,
    errors: Path | None = None,
    env: Mapping[str, str] | None = None,
    say: Say,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Return the exit status of a command, whose output is added to ``log``.

    Its errors go to ``errors``, or there too. ``meanwhile`` is called every second. If that raises,
    or the caller is stopped, the command is asked to end, and waited for.

    Raises:
        TimeoutError: it took more than ``LONGEST_S``.
    """
    with log.open("a") as out, (errors or log).open("a") as wrong:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=wrong, env=env)
        try:
            return _watched(process, log, say, meanwhile)
        finally:
            if process.poll() is None:
                process.terminate()  # it stops what it has started, and ends
                process.wait()


def _watched(
    process: subprocess.Popen[bytes], log: Path, say: Say, meanwhile: Callable[[], None]
) -> int:
    began = time.monotonic()
    for second in range(1, LONGEST_S):
        try:
            return process.wait(max(0.0, began + second - time.monotonic()))
        except subprocess.TimeoutExpired:
            meanwhile()
            if second % TELL_S == 0:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                say(f"  {lines[-1]}" if lines else f"  {second} s, and it has said nothing yet")
    raise TimeoutError(f"it took more than {LONGEST_S} s")
