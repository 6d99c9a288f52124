"""How long a rank of the trainer or of a gradient worker may be in each phase of its work.

A rank whose process is stopped is found by its heartbeat, whatever its phase
(``core.progress.watch``). These are for ranks that run and yet do not go on: they wait for another,
for a disk or for a network. Each is long, since nothing is known yet of a model's sizes and of its
host; twice the longest that was seen is allowed in any case.
"""

from __future__ import annotations

from collections.abc import Mapping

from libra_cli.core.types import Seconds

PHASES: Mapping[str, Seconds] = {
    # Everything is read from disks that may be cold, and checkpoints from other hosts.
    "starting": 1800.0,
    "loading the model": 1800.0,
    "resuming from a checkpoint": 1800.0,
    # Of rank 0, which looks up at least every ten seconds.
    "waiting for a command": 60.0,
    # Of the others: whatever rank 0 is at meanwhile has a limit of its own. It alone waits until a
    # version is on disk, and that of a large model takes minutes.
    "waiting for rank 0": 1800.0,
    # One micro-batch: on two cores 16,384 tokens of 0.5B parameters take minutes.
    "computing gradients": 600.0,
    "computing log-probabilities": 600.0,
    # As long as the trainer would take for the share itself, which it computes then.
    "fetching shares": 1800.0,
    "updating the weights": 600.0,
    "gathering log-ratios": 600.0,
    "updating the critic": 600.0,
    # The version before has to be written first, and a whole model to a slow disk takes long.
    "copying the weights": 1800.0,
    "writing a checkpoint": 1800.0,
    "loading a version": 600.0,
}
"""The longest that a rank may be in a phase, by its name up to a colon. Chosen: the phases that
read or write whole models as long as the collectives of ranks that wait for them."""
LONGEST_S: Seconds = 1800.0
"""Seconds that a phase without an entry in ``PHASES`` may take."""


def phase_limit_s(phase: str) -> Seconds:
    """Return the seconds that a rank may be in this phase without going on."""
    return PHASES.get(phase.partition(":")[0], LONGEST_S)
