"""Keeps the processes of a slot on the slot's cores (``nodes[].cores``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

PLACES = "LIBRA_CORES"
"""The variable in which a process is told the places of its cores (``core.launch.cores``)."""


@contextmanager
def bound_to(places: str) -> Iterator[None]:
    """Have what this thread starts meanwhile stay on the cores at these places among its own, in
    ascending order and from 0 on: ``2,3``. Without any, or where there are no such cores, it may
    use them all.

    A child has the cores of the thread that starts it, and so have its own children. To bind it
    once it runs would miss the threads that it has by then.
    """
    every = os.sched_getaffinity(0)
    wanted = {int(place) for place in places.split(",") if place}
    mine = {core for place, core in enumerate(sorted(every)) if place in wanted}
    if not mine:
        yield
        return
    os.sched_setaffinity(0, mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)
