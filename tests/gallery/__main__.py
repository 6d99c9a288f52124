"""Run recipes that need no GPU, keep what came, and make the page of the gallery from it.

    make gallery [ONLY="quickstart agent"] [AGAIN=1]
    python -m tests.gallery [NAME ...] [--again] [--draw]

An entry whose facts are of the code as it is now is not run again, so a command that was broken off
goes on where it was; ``--again`` runs it all the same, and ``--draw`` runs nothing and makes the
page anew. One that fails is told, keeps the facts that it had, and does not stop the others. What
runs leave is in ``build/gallery``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable

from tests.gallery import facts as kept
from tests.gallery.entries import CHECKOUT, ENTRIES
from tests.gallery.machine import commit
from tests.gallery.page import files
from tests.gallery.play import GalleryError, play

WORK = CHECKOUT / "build" / "gallery"


def main() -> None:
    """Run what is asked for and is not fresh, and make the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.gallery")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--again", action="store_true", help="run also what is fresh")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    typed = parser.parse_args()
    if unknown := [name for name in typed.names if name not in ENTRIES]:
        parser.error(f"there is no {', '.join(unknown)}: there are {', '.join(ENTRIES)}")
    # What is running is then stopped before the end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = [] if typed.draw else run(typed.names or ENTRIES, again=typed.again)
    draw()
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(names: Iterable[str], *, again: bool) -> list[str]:
    """Run entries in the order of ``ENTRIES`` and keep their facts; return those that failed."""
    WORK.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in (name for name in ENTRIES if name in names):
        if not again and is_fresh(name):
            say(f"{name}: is fresh; AGAIN=1 runs it again")
            continue
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        say(f"{name}: begins (load {load:.1f} on {cores} cores)")
        try:
            facts = play(ENTRIES[name], WORK, say)
        except Exception as error:  # noqa: BLE001 - told, and the others are run
            say(f"{name}: {error if isinstance(error, GalleryError) else repr(error)}")
            failed.append(name)
            continue
        path = kept.write(facts)
        draw()
        say(f"{name}: {facts.seconds.whole:.0f} s, {path.relative_to(CHECKOUT)}")
    return failed


def is_fresh(name: str) -> bool:
    """Whether the facts of an entry are of the code as it is now."""
    facts = kept.read(name)
    now = commit()
    return facts is not None and facts.machine.commit == now and not now.endswith("+")


def draw() -> None:
    """Make page and pictures from all facts that there are."""
    known = [one for name in ENTRIES if (one := kept.read(name)) is not None]
    for path, text in files(known).items():
        path.write_text(text, encoding="utf-8")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
