"""A run under several conditions, simulated side by side on the same trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev

from libra_cli.app.what_if.plans import in_force
from libra_cli.app.what_if.reading import Known
from libra_cli.core.evidence import Recalibration
from libra_cli.sim.played_run import Pace, PlayedGroups, PlayedRun, turn_seconds
from libra_cli.sim.rerun import Rerun, RunConditions, rerun

SEEDS = 5
"""Resamplings of a run's groups, the first of which is the run's own order."""
Z = 1.96
"""Standard errors in half of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A mean over resamplings, and half of its 95 % interval (None of a single one).

    The spread of resampled runs is that of other runs of the same kind, so it is not divided by
    their number.
    """

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Saving:
        """The estimate from the values of the resamplings."""
        return cls(fmean(values), Z * stdev(values) if len(values) > 1 else None)


class Trials:
    """A run, the conditions it was under, and simulations of it by conditions and seed."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.groups = PlayedGroups(known.run)
        self.measured = Pace.of(known.run.steps, known.run.began_anew)
        self._was: dict[int, Rerun] = {}

    @cached_property
    def as_it_was(self) -> RunConditions:
        """The conditions of the run, with ``correction``. Raises LibraError as ``play`` does."""
        given = self.priced
        return replace(given, profile=given.profile.recalibrated(self.correction))

    @cached_property
    def correction(self) -> Recalibration:
        """The factors by which prices are wrong: with them corrected, a turn on its server and a
        step in the trainer take as long simulated as they were measured. How long the run takes
        follows."""
        played = self.play(self.priced, 0)
        return Recalibration(
            turn_seconds(self.known.run.turns) / max(played.turn_s, 1e-9),
            self.measured.train_mean_s / played.pace.train_mean_s,
        )

    @property
    def priced(self) -> RunConditions:
        """The conditions of the run by its prices as they are, which costs no simulation."""
        run = self.known.run
        return RunConditions(
            run.recipe,
            self.known.profile,
            (in_force(run.plans), *run.plans[1:]),
            steps=len(run.steps),
            further=0 if _wound_down(run) else 2 + run.recipe.training.max_staleness,
        )

    def was(self, seed: int) -> Rerun:
        """The run simulated as it was. Raises LibraError as ``play`` does."""
        if seed not in self._was:
            self._was[seed] = self.play(self.as_it_was, seed)
        return self._was[seed]

    def play(self, given: RunConditions, seed: int) -> Rerun:
        """Simulate the run under these conditions. Raises LibraError where it cannot go on."""
        return rerun(given, self.groups.played(seed))


def _wound_down(run: PlayedRun) -> bool:
    """Whether the last steps are those in which nothing was begun any more."""
    return run.steps[-1].step >= run.recipe.run.steps


def saved(before: Sequence[Rerun], after: Sequence[Rerun]) -> Saving:
    """The share of the time that the one takes less than the other, seed by seed."""
    pairs = zip(before, after, strict=True)
    return Saving.of([1 - then.pace.step_s / now.pace.step_s for now, then in pairs])
