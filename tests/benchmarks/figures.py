"""Measured figures, and whether one is worse than that of the measurement before."""

from __future__ import annotations

from pathlib import Path

from tests.gallery.entries import CHECKOUT
from tests.gallery.facts import Fact, Machine

FOLDER = CHECKOUT / "libra_cli" / "help" / "benchmarks"


class Figure(Fact):
    """One number that was measured, in ``unit``."""

    what: str
    value: float
    unit: str
    less_is_better: bool = True
    noise: float = 0.2
    """The share by which two measurements of the same code may differ; chosen, not measured."""


class FaultKind(Fact):
    """What became of the faults of a kind: seconds until the run had recovered from each."""

    kind: str
    seconds: list[float]
    not_recovered: int


class Measurement(Fact):
    """The figures of a suite, measured at one time on one machine."""

    day: str
    machine: Machine
    seconds: float
    """How long measuring took."""
    figures: list[Figure]
    faults: list[FaultKind]
    checks: list[str]
    """What was checked after the faults, in the words of the campaign."""


class Measured(Fact):
    """A suite's newest measurement, and the last one before it on a quiet machine."""

    suite: str
    newest: Measurement
    before: Measurement | None = None


def path_of(suite: str, folder: Path = FOLDER) -> Path:
    """Where the figures of a suite are."""
    return folder / f"{suite}.json"


def read(suite: str, folder: Path = FOLDER) -> Measured | None:
    """The figures that were kept of a suite; None if there are none.

    Raises:
        ValidationError: the file holds something else.
    """
    path = path_of(suite, folder)
    return Measured.model_validate_json(path.read_bytes()) if path.is_file() else None


def keep(suite: str, newest: Measurement, folder: Path = FOLDER) -> Measured:
    """Keep a measurement beside the newest one that was made on a quiet machine."""
    known = read(suite, folder)
    before = None
    if known is not None:
        before = known.before if known.newest.machine.is_busy else known.newest
    measured = Measured(suite=suite, newest=newest, before=before)
    folder.mkdir(parents=True, exist_ok=True)
    text = measured.model_dump_json(indent=1) + "\n"
    path_of(suite, folder).write_text(text, encoding="utf-8")
    return measured


def previous(measured: Measured, figure: Figure) -> Figure | None:
    """The figure of the same name before; None if there is none that can be compared."""
    before, machine = measured.before, measured.newest.machine
    if before is None or machine.is_busy or not _alike(before.machine, machine):
        return None
    return next((one for one in before.figures if one.what == figure.what), None)


def _alike(one: Machine, other: Machine) -> bool:
    return (one.cpu, one.cores, one.gpus) == (other.cpu, other.cores, other.gpus)


def is_worse(now: Figure, before: Figure) -> bool:
    """Whether a figure is worse than the one before by more than its noise."""
    change = (now.value - before.value) / before.value if before.value else 0.0
    return (change if now.less_is_better else -change) > now.noise
