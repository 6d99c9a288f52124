"""Measure, keep what came beside what was there before, and make the page of benchmarks.

    make benchmarks [ONLY="decisions sync"] [AGAIN=1]
    python -m tests.benchmarks [NAME ...] [--again] [--draw]

A suite that was measured at the code as it is now is not measured again, so a command that was
broken off goes on where it was; ``--again`` measures it all the same, and ``--draw`` measures
nothing and makes the page anew. One that fails is told and does not stop the others. Some need
root: they make hosts in network namespaces.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterable

from tests.benchmarks import figures as kept
from tests.benchmarks.figures import Measurement
from tests.benchmarks.page import files
from tests.benchmarks.suites import SUITES, SuiteError, measure
from tests.gallery.machine import commit, machine


def main() -> None:
    """Measure what is asked for and is not fresh, and make the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--again", action="store_true", help="measure also what is fresh")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    typed = parser.parse_args()
    if unknown := [name for name in typed.names if name not in SUITES]:
        parser.error(f"there is no {', '.join(unknown)}: there are {', '.join(SUITES)}")
    # What is running is then stopped before the end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = [] if typed.draw else run(typed.names or SUITES, again=typed.again)
    draw()
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(names: Iterable[str], *, again: bool) -> list[str]:
    """Measure suites in the order of ``SUITES`` and keep what came; return those that failed."""
    failed = []
    for name in (name for name in SUITES if name in names):
        if not again and is_fresh(name):
            say(f"{name}: is fresh; AGAIN=1 measures it again")
            continue
        at, day, began = machine(), time.strftime("%Y-%m-%d"), time.monotonic()
        say(f"{name}: begins (load {at.load} on {at.cores} cores)")
        try:
            result = measure(SUITES[name], say)
        except Exception as error:  # noqa: BLE001 - told, and the others are measured
            say(f"{name}: {error if isinstance(error, SuiteError) else repr(error)}")
            failed.append(name)
            continue
        took = round(time.monotonic() - began, 1)
        figures, faults = list(result.figures), list(result.faults)
        measured = Measurement(
            day=day,
            machine=at,
            seconds=took,
            figures=figures,
            faults=faults,
            checks=list(result.checks),
        )
        kept.keep(name, measured)
        draw()
        say(f"{name}: {took:.0f} s, {len(figures)} figures, {len(faults)} kinds of faults")
    return failed


def is_fresh(name: str) -> bool:
    """Whether a suite was measured at the code as it is now."""
    known, now = kept.read(name), commit()
    return known is not None and known.newest.machine.commit == now and not now.endswith("+")


def draw() -> None:
    """Make the page from all figures that there are."""
    known = [one for name in SUITES if (one := kept.read(name)) is not None]
    for path, text in files(known).items():
        path.write_text(text, encoding="utf-8")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
