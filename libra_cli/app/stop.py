"""``libra stop``: end a run, and prove that nothing of it is left on any host."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import LibraError, StateError, WrongRun
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.records import RunRecord
from libra_cli.core.types import Seconds
from libra_cli.runtime.hosts.cluster import host_of
from libra_cli.runtime.store.controller_process import (
    controller_alive,
    controller_is_here,
    process_started,
)
from libra_cli.runtime.store.nearby_runs import RUNS
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of, running_runs

STOP_TIMEOUT_S = 300.0
POLL_S = 0.2


def stop(run_dir: Path, *, at_once: bool, note: Callable[[str], None]) -> list[str]:
    """``libra stop``: ask the controller, or clean up after one that is gone.

    A run that is ending already is only waited for, unless it is to end ``at_once``.

    Returns:
        What could not be proved gone; empty when nothing is left.

    Raises:
        WrongRun: there is no such run, or its controller is on another machine.
        StateError: the controller does not come to an end.
    """
    with Reader(run_dir) as reader:
        row, alive = reader.run(), controller_alive(reader)
        home, here = str(reader.meta.get("host")), controller_is_here(reader)
    if alive and not here:
        raise WrongRun(
            f"{run_dir} was started on {home}, and only there its controller can be told to stop",
            hint=f"on {home}: libra stop {run_dir}",
        )
    if alive:
        if row.is_ending and not at_once:  # its controller takes a second signal for: at once
            note(f"it is stopping already, and waited for; at once: libra stop --now {run_dir}")
        else:
            _interrupt(row, at_once=at_once)
            note("waiting for the controller: checkpoint, drain, stop")
        _await_end(row, run_dir)
    note("asking every host what is left of this run")
    return asyncio.run(_stop_remains(recipe_of(run_dir), row.id))


@dataclass(frozen=True, slots=True)
class RunToStop:
    """The run that is meant where none is named, for a question to whoever asks."""

    run_dir: Path
    step: int
    steps: int
    others: int
    """How many other runs of this directory are running, none of which is stopped."""


def run_to_stop() -> RunToStop:
    """Return the newest run under ``runs/`` that is running.

    Raises:
        WrongRun: none is.
    """
    running = running_runs()
    if not running:
        raise WrongRun(
            f"no run under {RUNS} is running",
            hint="libra stop RUN_DIR also clears the hosts of one whose controller is gone",
        )
    with Reader(running[0]) as reader:
        row = reader.run()
    return RunToStop(running[0], row.step, row.target_steps, len(running) - 1)


def _interrupt(row: RunRecord, *, at_once: bool) -> None:
    try:
        pidfd = os.pidfd_open(row.controller_pid)
    except ProcessLookupError:
        return  # it has just come to its end
    try:
        # Looked at again with the descriptor in hand: now the pid cannot be recycled under us.
        if process_started(row.controller_pid) == row.controller_started:
            for _ in range(2 if at_once else 1):
                signal.pidfd_send_signal(pidfd, signal.SIGINT)
                time.sleep(POLL_S)
    finally:
        os.close(pidfd)


def _await_end(row: RunRecord, run_dir: Path) -> None:
    give_up = time.monotonic() + STOP_TIMEOUT_S
    while process_started(row.controller_pid) == row.controller_started:
        if time.monotonic() > give_up:
            raise StateError(
                f"the controller (pid {row.controller_pid}) is still stopping",
                hint=f"libra stop --now {run_dir}",
            )
        time.sleep(POLL_S)


async def _stop_remains(recipe: Recipe, run_id: str) -> list[str]:
    """Stop what is left on all hosts at once; return a line for what stays or does not answer."""
    found = await asyncio.gather(
        *(_left_on(node, run_id, recipe.run.lease_s) for node in recipe.nodes)
    )
    return [line for lines in found for line in lines]


async def _left_on(node: NodeSpec, run_id: str, lease_s: Seconds) -> list[str]:
    try:
        return [f"{node.name}: {line}" for line in await host_of(node).stop_remains(run_id)]
    except LibraError as error:
        lease = f"its lease of {lease_s:g} s ends what runs there"
        return [f"{node.name}: {error}; {lease}"]
