"""Measure, keep what came beside what was there before, and make the page of benchmarks.

    make benchmarks [ONLY="decisions sync"] [AGAIN=1]

``tests.made_page`` says what its command takes. Some suites need root: they make hosts in network
namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks import figures as kept
from tests.benchmarks.figures import Measurement
from tests.benchmarks.page import files
from tests.benchmarks.suites import SUITES, measure
from tests.gallery.machine import machine
from tests.made_page import MadePage, say


def made(name: str) -> str:
    """Measure a suite and keep its figures."""
    at, day, began = machine(), time.strftime("%Y-%m-%d"), time.monotonic()
    result = measure(SUITES[name], say)
    measured = Measurement(
        day=day,
        machine=at,
        seconds=round(time.monotonic() - began, 1),
        figures=list(result.figures),
        faults=list(result.faults),
        checks=list(result.checks),
    )
    kept.keep(name, measured)
    figures, faults = len(measured.figures), len(measured.faults)
    return f"{measured.seconds:.0f} s, {figures} figures, {faults} kinds of faults"


def commit_of(name: str) -> str | None:
    """Return the commit of the code that a suite was measured with."""
    known = kept.read(name)
    return known.newest.machine.commit if known else None


def texts() -> Mapping[Path, str]:
    """Return the page, from all figures that there are."""
    return files([one for name in SUITES if (one := kept.read(name)) is not None])


BENCHMARKS = MadePage("tests.benchmarks", SUITES, commit_of, made, texts)

if __name__ == "__main__":
    BENCHMARKS.main()
