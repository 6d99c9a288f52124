"""A run under several conditions, simulated side by side on the same trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean, stdev

from libra_cli.app.what_if.plans import in_force, words_of
from libra_cli.app.what_if.reading import Known
from libra_cli.core.evidence import Recalibration
from libra_cli.sim.played_run import AdoptedPlan, Pace, PlayedGroups, PlayedRun, turn_seconds
from libra_cli.sim.rerun import (
    Rerun,
    RunConditions,
    number_of_parts,
    part_error_of,
    parts_of,
    rerun,
)
from libra_cli.sim.side_by_side import side_by_side

SEEDS = 5
"""Resamplings of a run's groups, the first of which is the run's own order."""
Z = 1.96
"""Standard errors in half of a 95 % interval."""


LEAST_SEEDS = 3
"""Resamplings whose spread is told; of fewer that of a run's parts is."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A share of the time that is saved, and half of its 95 % interval.

    The interval has three parts, in quadrature. ``noise`` is by the trajectories: the spread of
    resampled runs is that of other runs of the same kind, so it is not divided by their number.
    ``error`` is by the simulator: its error in parts of the run as it was (``part_error_of``), for
    as much of the time as the two ran under different conditions. ``prices`` is by what the run
    does not tell of its prices: half of the difference between the extremes (``costs.hindsight``).
    """

    mean: float
    noise: float
    error: float
    prices: float = 0.0

    @property
    def half(self) -> float:
        """Half of the 95 % interval."""
        return hypot(self.noise, self.error, self.prices)


class Trials:
    """A run, the conditions it was under, and simulations of it by conditions and seed."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.groups = PlayedGroups(known.run)
        run = known.run
        self.measured = Pace.of(run.steps, run.began_anew, run.every)
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
        run, profile = self.known.run, self.known.profile
        return RunConditions(
            run.recipe,
            # A simulated step stands for several: so do the seconds of a move.
            replace(profile, moves=profile.moves.scaled(1 / run.every)),
            tuple(self._placed()),
            steps=run.played_steps,
            further=0 if _wound_down(run) else 2 + run.recipe.training.max_staleness,
        )

    def _placed(self) -> Iterator[AdoptedPlan]:
        """The plans of the run, by the steps that are played."""
        run = self.known.run
        yield in_force(run.plans)
        for one in run.plans[1:]:
            yield replace(one, after_step=(one.after_step + run.every // 2) // run.every)

    def was(self, seed: int) -> Rerun:
        """The run simulated as it was. Raises LibraError as ``play`` does."""
        if seed not in self._was:
            self._was[seed] = self.play(self.as_it_was, seed)
        return self._was[seed]

    def play(self, given: RunConditions, seed: int) -> Rerun:
        """Simulate the run under these conditions. Raises LibraError where it cannot go on."""
        return rerun(given, self.groups.played(seed))

    def play_all(self, asked: Sequence[tuple[RunConditions, int]]) -> Iterator[Rerun]:
        """Simulate the run under each of these conditions, with its seed, on every core there is.
        Raises LibraError as ``play`` does."""
        return side_by_side(lambda one: self.play(*one), asked)

    def each_was(self, seeds: int) -> Iterator[Rerun]:
        """Simulate the run as it was with so many seeds, as ``play_all`` does; ``was`` keeps what
        came."""
        for seed, played in enumerate(self.play_all(with_seeds(self.as_it_was, seeds))):
            self._was[seed] = played
            yield played

    def saved(
        self, given: RunConditions, after: Sequence[Rerun], *, thorough: bool = True
    ) -> Saving:
        """The share of the time that the run takes less under these conditions, played seed by seed
        from the first on; ``thorough``: at other prices too, which takes further simulations."""
        before = [self.was(seed) for seed in range(len(after))]
        mean = 1 - fmean(
            then.pace.step_s / now.pace.step_s for now, then in zip(before, after, strict=True)
        )
        wrong = part_error_of(before[0].pace, self.measured)
        error = Z * wrong * self._changed(given)
        prices = self._price_error(given) if thorough else 0.0
        return Saving(mean, _noise(before, after), error, prices)

    @cached_property
    def _extremes(self) -> tuple[Trials, ...]:
        known = self.known
        found = [Trials(replace(known, profile=one, extremes=())) for one in known.extremes]
        for one, (correction, was) in zip(found, side_by_side(_first_look, found), strict=True):
            one.correction, one._was[0] = correction, was
        return tuple(found)

    def _price_error(self, given: RunConditions) -> float:
        """Half of the difference of what is saved at the extreme prices; 0 at prices of others."""
        if given.profile != self.as_it_was.profile or not self._extremes:
            return 0.0
        saved = list(side_by_side(partial(_saved_at, given), self._extremes))
        return (max(saved) - min(saved)) / 2

    def _changed(self, given: RunConditions) -> float:
        """The share of the run's time that it was under other conditions than these."""
        was = self.as_it_was
        if replace(given, plans=was.plans) != was:
            return 1.0
        seconds = [0.0, 0.0]
        for number, step_s in enumerate(self.measured.steps_s, start=1):
            alike = _at(given.plans, number) == _at(was.plans, number)
            seconds[alike] += step_s
        return seconds[False] / sum(seconds)


def with_seeds(given: RunConditions, seeds: int) -> list[tuple[RunConditions, int]]:
    """Return these conditions with each of so many seeds, from the first on."""
    return [(given, seed) for seed in range(seeds)]


def _first_look(trials: Trials) -> tuple[Recalibration, Rerun]:
    return trials.correction, trials.was(0)


def _saved_at(given: RunConditions, trials: Trials) -> float:
    """The share of the time that these conditions save at the prices of ``trials``."""
    then = trials.play(replace(given, profile=trials.as_it_was.profile), 0)
    return 1 - then.pace.step_s / trials.was(0).pace.step_s


def _at(plans: Sequence[AdoptedPlan], step: int) -> str:
    """The plan that is in force after so many steps, in words."""
    one = [one for one in plans if one.after_step <= step][-1]
    return words_of(one.plan, one.slots)


def _wound_down(run: PlayedRun) -> bool:
    """Whether the last steps are those in which nothing was begun any more."""
    return run.every == 1 and run.steps[-1].step >= run.recipe.run.steps


def _noise(before: Sequence[Rerun], after: Sequence[Rerun]) -> float:
    """Half of the 95 % interval by the trajectories: from the spread of the resamplings; of few
    ones from differences of consecutive parts (von Neumann's estimate), which drifts hardly touch.
    """
    ratios = [then.pace.step_s / now.pace.step_s for now, then in zip(before, after, strict=True)]
    if len(ratios) >= LEAST_SEEDS:
        return Z * stdev(ratios)
    number = number_of_parts(before[0].pace)
    now, then = (parts_of(one[0].pace, number) for one in (before, after))
    excess = [y - ratios[0] * x for x, y in zip(now, then, strict=True)]
    return Z * sqrt(sum((y - x) ** 2 for x, y in pairwise(excess)) / 2) / sum(now)
