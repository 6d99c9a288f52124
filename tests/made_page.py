"""The command line of a page that is made from measurements: the gallery, and the benchmarks.

    python -m PROGRAM [NAME ...] [--again] [--draw]

An entry whose facts are of the code as it is now is left alone, so a command that was broken off
goes on where it was; ``--again`` makes it all the same, and ``--draw`` makes the page anew and
nothing else. One that fails is told, keeps the facts that it had, and does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.gallery.machine import commit

SETTLE_S = 120.0
"""Seconds in which the work of an entry has gone from the load, and that of others has not."""


class EntryFailed(Exception):
    """An entry cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class MadePage:
    """A page and what makes its entries."""

    program: str
    entries: Collection[str]
    """The names of all entries, in order."""
    commit_of: Callable[[str], str | None]
    """Returns the commit that an entry's facts are of; None if it has none."""
    make: Callable[[str], str]
    """Makes an entry, keeps its facts, and returns what to tell of it."""
    files: Callable[[], Mapping[Path, str]]
    """Returns the texts of the page and its pictures, from all facts that there are."""

    def main(self) -> None:
        """Make what is asked for and is not fresh, and the page."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.program}")
        names = ", ".join(self.entries)
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}")
        parser.add_argument("--again", action="store_true", help="make also what is fresh")
        parser.add_argument("--draw", action="store_true", help="make nothing but the page")
        typed = parser.parse_args()
        if unknown := [name for name in typed.names if name not in self.entries]:
            parser.error(f"there is no {', '.join(unknown)}: there are {names}")
        # What is running is then stopped before the end.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        failed = [] if typed.draw else self.run(typed.names or self.entries, again=typed.again)
        self.draw()
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)

    def run(self, names: Iterable[str], *, again: bool) -> list[str]:
        """Make entries in their order, and the page after each; return those that failed."""
        wanted = set(names)
        failed = []
        for name in (name for name in self.entries if name in wanted):
            if not again and self.is_fresh(name):
                say(f"{name}: is fresh; AGAIN=1 makes it again")
                continue
            load, cores = _load_once_quiet(), _cores()
            say(f"{name}: begins (load {load:.1f} on {cores} cores)")
            try:
                told = self.make(name)
            except Exception as error:  # noqa: BLE001 - told, and the others are made
                say(f"{name}: {error if isinstance(error, EntryFailed) else repr(error)}")
                failed.append(name)
                continue
            self.draw()
            say(f"{name}: {told}")
        return failed

    def is_fresh(self, name: str) -> bool:
        """Whether the facts of an entry are of the code as it is now."""
        now = commit()
        return self.commit_of(name) == now and not now.endswith("+")

    def draw(self) -> None:
        """Write the page and its pictures."""
        for path, text in self.files().items():
            path.write_text(text, encoding="utf-8")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _load_once_quiet() -> float:
    """Return the load once the cores are half idle, or after ``SETTLE_S`` if others use them.

    The load is a mean of a minute, in which the entry before may have worked.
    """
    give_up = time.monotonic() + SETTLE_S
    while os.getloadavg()[0] > _cores() / 2 and time.monotonic() < give_up:
        time.sleep(1.0)
    return os.getloadavg()[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
