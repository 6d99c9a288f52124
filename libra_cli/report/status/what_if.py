"""What ``libra bench run`` tells: the object of ``--json``.

Seconds and shares are from the end of the first step on, since before it everything was starting. A
change is relative to the simulated run as it was, on the same trajectories: -0.1 takes 10 % less
time. What nobody knows is null.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra_cli.core.records import RegretRecord

FORMAT = 1


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One run, measured or simulated. ``change_ci`` is half of the 95 % interval of ``change``."""

    name: str
    plan: str
    step_s: float
    total_s: float
    tokens_per_s: float
    idle_rollout: float | None
    idle_training: float
    moves: int
    change: float | None = None
    change_ci: float | None = None


@dataclass(frozen=True, slots=True)
class FidelityPart:
    """How far the simulated run as it was is from the measured one: of the whole time, signed (+ is
    simulated too slow), and the mean size of the errors of single steps."""

    error: float
    each_step: float


@dataclass(frozen=True, slots=True)
class CorrectionsPart:
    """The factors on the prices with which a turn on a server, and a step in the trainer, take as
    long simulated as they were measured."""

    rollout: float
    training: float


@dataclass(frozen=True, slots=True)
class CensoredPart:
    """Trajectories that had begun and not finished, all of which are played on; those for which no
    finished one was longer end where they were."""

    trajectories: int
    without_longer: int


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """A run as it was measured, as it is simulated, and what would have been."""

    format: int
    run: str
    state: str
    steps: int
    seeds: int
    prices: str
    corrections: CorrectionsPart
    fidelity: FidelityPart
    censored: CensoredPart
    rows: list[WhatIfRow]
    regret: RegretRecord
    notes: list[str]
