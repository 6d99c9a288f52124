"""Makes the page of benchmarks from the figures that were kept, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks.figures import FOLDER, FaultKind, Figure, Measured, is_worse, previous
from tests.benchmarks.suites import SUITES, Suite
from tests.gallery.page import on_machine

INTRODUCTION = """\
# Benchmarks: recoveries, decisions, turns and weights, measured

`make benchmarks` measures what is here and makes this page of it. The numbers lie beside it
(`benchmarks/NAME.json`), with those of the measurement before. One that is worse than before by
more than the share in its row, which was chosen, is marked **worse**, if both are of the same kind
of machine and neither was measured beside other work.
"""


def page(known: Sequence[Measured]) -> str:
    """Return the Markdown of the page, in the order of ``SUITES``."""
    found = {one.suite: one for one in known}
    sections = [
        "\n".join(_section(suite, found[name])) for name, suite in SUITES.items() if name in found
    ]
    return "\n".join([INTRODUCTION, *sections]).rstrip("\n") + "\n"


def files(known: Sequence[Measured]) -> dict[Path, str]:
    """Return the text of the page by its path."""
    return {FOLDER.with_suffix(".md"): page(known)}


def _section(suite: Suite, measured: Measured) -> Iterator[str]:
    newest = measured.newest
    yield f"## {suite.title}\n"
    yield f"{suite.about}\n"
    yield f"```\n{suite.command.format(out='/tmp/out')}\n```\n"
    yield (
        f"{newest.day}, commit {newest.machine.commit}, {newest.seconds:.0f} s on"
        f" {on_machine(newest.machine)}.\n"
    )
    if newest.faults:
        yield from _faults(newest.faults)
        told = "; ".join(newest.checks) or "what the search for leftovers found was not stored"
        yield f"\nAfterwards: {told}."
    if newest.figures:
        yield "| what | now | before | unit | may differ | |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for figure in newest.figures:
            yield _row(figure, previous(measured, figure))
    yield ""


def _row(figure: Figure, before: Figure | None) -> str:
    cells = (
        figure.what,
        _number(figure.value),
        "-" if before is None else _number(before.value),
        figure.unit,
        f"{figure.noise:.0%}",
        "**worse**" if before is not None and is_worse(figure, before) else "",
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _faults(faults: Sequence[FaultKind]) -> Iterator[str]:
    yield "| fault | faults | recovered | median s | worst s |"
    yield "| --- | --- | --- | --- | --- |"
    for one in sorted(faults, key=lambda one: one.kind):
        yield _fault(one)
    every = [second for one in faults for second in one.seconds]
    lost = sum(one.not_recovered for one in faults)
    yield _fault(FaultKind(kind="**all**", seconds=every, not_recovered=lost))


def _fault(one: FaultKind) -> str:
    count = len(one.seconds)
    times = f"{median(one.seconds):.1f} | {max(one.seconds):.1f}" if count else "- | -"
    return f"| {one.kind} | {count + one.not_recovered} | {count} | {times} |"
