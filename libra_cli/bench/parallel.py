"""Simulated runs side by side, on every core there is."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import parent_process
from threading import Thread
from typing import TypeVar

from libra_cli.bench.config import Progress
from libra_cli.bench.jobs import Job

_T = TypeVar("_T")


def simulated(run: Callable[[Job], _T], jobs: Sequence[Job], progress: Progress) -> Iterator[_T]:
    """Yield the result of ``run`` for each job, in order, on every core there is."""
    cores = len(os.sched_getaffinity(0))
    one = partial(_cleared, run)
    with ProcessPoolExecutor(min(cores, len(jobs) or 1), initializer=_leave_with_parent) as pool:
        for number, (job, done) in enumerate(zip(jobs, pool.map(one, jobs), strict=True), start=1):
            progress(f"{number} of {len(jobs)} runs: {job.trace.name}, {job.planner}, {job.policy}")
            yield done


def _cleared(run: Callable[[Job], _T], job: Job) -> _T:
    """A run makes next to no cycles but its world, which is one: looking for them before it is over
    took 5 to 10 % of its time."""
    gc.disable()
    done = run(job)
    gc.collect()
    return done


def _leave_with_parent() -> None:
    """A process of the pool waits for work for ever, also from a parent that was killed."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
