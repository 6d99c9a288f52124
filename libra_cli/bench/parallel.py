"""The jobs of an experiment side by side, with word of how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from libra_cli.bench.config import Progress
from libra_cli.bench.jobs import Job
from libra_cli.sim.side_by_side import side_by_side

_T = TypeVar("_T")


def simulated(run: Callable[[Job], _T], jobs: Sequence[Job], progress: Progress) -> Iterator[_T]:
    """Yield the result of ``run`` for each job, in order, on every core there is."""
    found = zip(jobs, side_by_side(run, jobs), strict=True)
    for number, (job, done) in enumerate(found, start=1):
        progress(f"{number} of {len(jobs)} runs: {job.trace.name}, {job.planner}, {job.policy}")
        yield done
