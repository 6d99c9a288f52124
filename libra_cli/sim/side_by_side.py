"""Simulations side by side, on every core there is."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")

_inherited: dict[str, Any] = {}
"""In a process of the pool: what it plays (``play``), and with what (``given``)."""


def side_by_side(play: Callable[[_Given], _Found], given: Sequence[_Given]) -> Iterator[_Found]:
    """Yield what ``play`` returns for each of these, in order, from as many processes as cores.

    They are forked, so what is given need not be picklable; what is found has to be. Raises what
    ``play`` raises.
    """
    cores = min(len(os.sched_getaffinity(0)), len(given) or 1)
    with ProcessPoolExecutor(
        cores, mp_context=get_context("fork"), initializer=_inherit, initargs=(play, given)
    ) as pool:
        yield from pool.map(_play, range(len(given)))


def _inherit(play: Callable[[_Given], Any], given: Sequence[_Given]) -> None:
    _inherited.update(play=play, given=given)
    gc.freeze()  # what was there before is nobody's garbage, and stays shared with the parent
    _leave_with_parent()


def _play(number: int) -> Any:
    """A run makes next to no cycles but its world, which is one: looking for them before it is over
    took 5 to 10 % of its time."""
    gc.disable()
    found = _inherited["play"](_inherited["given"][number])
    gc.collect()
    return found


def _leave_with_parent() -> None:
    """A process of the pool waits for work for ever, also from a parent that was killed."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
