"""The regret certificate: what a run lost to the best plan that stays, in hindsight.

The run is simulated as it was and under plans that stay, on its own trajectories and prices, seed
by seed with the same groups: all of it, since what drifts makes plans differ. It is told when the
run ends, within ``BUDGET_S``: of a long run every second or third step or fewer is simulated, of
many plans those that the prices say are best, and as many seeds as there is time for.

The interval holds the simulator's own error too (``trials.Saving``), and a difference that is
smaller is none.

Limit: of plans that were not simulated it knows nothing; a step that stands for several is followed
by another than it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TypeAlias

from libra_cli.app.what_if.plans import staying_plans, words_of
from libra_cli.app.what_if.reading import WhatIfError, known_of
from libra_cli.app.what_if.trials import SEEDS, Trials, with_seeds
from libra_cli.config.errors import LibraError
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.records import RegretRecord
from libra_cli.core.types import Pool, Seconds
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.played_run import AdoptedPlan
from libra_cli.sim.rerun import Rerun, RunConditions, error_of

LEAST_STEPS = 10
"""Steps of a run of which there is a certificate."""
MOST_PLANS = 4
"""Plans that stay of a run which are simulated, by prices the best of all."""
BUDGET_S, MOST_WAIT = 8.0, 3.0
"""Seconds of work after which no further simulation begins; and how many times as long that may
take where other work has the cores."""
TURN_S, FEW_PLANS = 2.5e-4, 2
"""Seconds that a simulated turn takes, and plans, until it is known: 1.6e-4 s on an idle core."""
AGAINST = "static"
ONE_PLAN = "the recipe allows one plan alone: its pools fix what every slot does"
ALIKE = 0.005
"""Shares that are told as 0 %."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of this thread's work that are left of ``work_s``."""

    work_s: Seconds
    worked_s: Seconds = field(default_factory=time.thread_time)
    began: Seconds = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> Seconds:
        """Seconds left, none after ``MOST_WAIT`` times as many have passed."""
        waited = self.began + MOST_WAIT * self.work_s < time.monotonic()
        return 0.0 if waited else self.worked_s + self.work_s - time.thread_time()


@dataclass(frozen=True, slots=True)
class Rival:
    """A plan that stays, and its simulations by seed."""

    words: str
    plan: AdoptedPlan
    played: list[Rerun] = field(default_factory=list)


Found: TypeAlias = tuple[RegretRecord, list[Rival]]
"""A certificate, and the plans that it is from."""


def certify(run_dir: Path) -> None:
    """Find the certificate of a run that has ended, and write it to its database.

    Whatever goes wrong becomes the certificate's sentence: a run that has ended has ended well.
    """
    row, _ = or_reason(lambda: certificate(run_dir))
    with Journal(run_dir) as journal:
        journal.save(row)


def or_reason(find: Callable[[], Found]) -> Found:
    """What is found, or a row that says why there is no certificate."""
    try:
        return find()
    except LibraError as error:
        why = f"{error}; {error.hint}" if error.hint else str(error)
    except Exception as error:  # noqa: BLE001 - whatever a simulation raises must fail no run
        why = f"{type(error).__name__}: {error}"
    return RegretRecord(AGAINST, time.time(), f"no regret certificate: {why}"), []


def certificate(run_dir: Path) -> Found:
    """The certificate of a run that has ended, as ``regret_of`` has it.

    Raises:
        WhatIfError: the run is too short.
        LibraError: there is none, and why.
    """
    budget = Budget(BUDGET_S)
    with Reader(run_dir) as reader:
        taken = reader.run().step
        if taken < LEAST_STEPS:
            raise WhatIfError(f"of {taken} steps, and {LEAST_STEPS} are needed")
        # Before all its turns are read: most recipes on CPUs leave no choice.
        if not any(slot.pool is Pool.HYBRID for slot in slots_of(recipe_of(run_dir))):
            raise WhatIfError(ONE_PLAN)
        trials = _that_fit(reader, budget)
    return regret_of(trials, budget)


def _that_fit(reader: Reader, budget: Budget) -> Trials:
    """Trials of so many of the run's steps that there is time for one seed under every plan."""
    most = max(1, reader.run().step // LEAST_STEPS)
    wanted = reader.turn_count() * TURN_S * (2 + FEW_PLANS) / budget.work_s
    while True:
        every = max(1, ceil(min(most, wanted)))
        trials = Trials(known_of(reader, every=every))
        others, before_s = len(_rivals(trials)), budget.left_s
        if before_s <= 0:
            return trials
        _ = trials.correction  # which tells how long a simulation takes, and is kept
        left_s = budget.left_s
        took_s = before_s - left_s
        if took_s * (1 + others) <= left_s or every == most or left_s <= 0:
            return trials
        wanted = max(every + 1, every * took_s * (2 + others) / left_s)


def regret_of(trials: Trials, budget: Budget | None = None) -> Found:
    """The certificate by these trials, and what it is from; without a ``budget`` it takes its time.

    Raises:
        WhatIfError: the recipe allows no other plan, or there was too little time.
        LibraError: none can run.
    """
    began = time.monotonic()
    known = trials.known
    rivals = _rivals(trials)
    seeds = _play_within(trials, rivals, budget) if budget else _play(trials, rivals)
    if not seeds:
        raise WhatIfError(
            f"{BUDGET_S:.0f} s were too few to simulate {len(known.run.turns):,} turns",
            hint=f"libra bench run {known.run_dir} takes its time",
        )
    best = min(rivals, key=lambda rival: sum(one.pace.step_s for one in rival.played))
    regret = trials.saved(_under(trials, best), best.played, thorough=budget is None)
    row = RegretRecord(
        against=AGAINST,
        at=time.time(),
        text="",
        regret=regret.mean,
        ci95=regret.half,
        plan=best.words,
        plans=len(rivals),
        steps=known.run.played_steps,
        seeds=seeds,
        error=error_of(trials.was(0).pace, trials.measured),
        seconds=time.monotonic() - began,
    )
    part = "" if known.run.every == 1 else f"{row.steps} of its {len(known.run.steps)} steps, "
    return replace(row, text=_sentence(row, part)), rivals


def _play(trials: Trials, rivals: Sequence[Rival]) -> int:
    """Simulate the run under every plan, all side by side; return with how many seeds."""
    asked = [pair for one in rivals for pair in with_seeds(_under(trials, one), SEEDS)]
    played = trials.play_all(asked)
    for rival in rivals:
        rival.played.extend(islice(played, SEEDS))
    return SEEDS


def _play_within(trials: Trials, rivals: Sequence[Rival], budget: Budget) -> int:
    """Simulate the run as it was and under every plan, one after the other; return with how many
    seeds there was time for."""
    for seed in range(SEEDS):
        found = []
        for one in (None, *rivals):
            if budget.left_s <= 0:
                return seed
            found.append(trials.play(_under(trials, one), seed) if one else trials.was(seed))
        for rival, played in zip(rivals, found[1:], strict=True):
            rival.played.append(played)
    return SEEDS


def _under(trials: Trials, rival: Rival) -> RunConditions:
    return replace(trials.as_it_was, plans=(rival.plan,))


def _rivals(trials: Trials) -> list[Rival]:
    """The plans that stay, the best ones by prices. Raises LibraError where there is no choice."""
    known = trials.known
    samples = known.observation.workload.samples
    plans = staying_plans(trials.priced, samples, MOST_PLANS)
    if len(plans) < 2:
        raise WhatIfError(ONE_PLAN)
    return [Rival(words_of(one.plan, one.slots), one) for one in plans]


def _sentence(row: RegretRecord, part: str) -> str:
    """The certificate in words; ``part`` is what was simulated of the run."""
    lost, half, error = row.regret or 0.0, row.ci95 or 0.0, row.error or 0.0
    basis = (
        f"simulated, {part}{100 * abs(error):.0f} % too {'slow' if error > 0 else 'fast'} as it was"
    )
    if abs(lost) < ALIKE and half < ALIKE:
        which = f"the best of {row.plans} plans that stay, in hindsight ({row.plan})"
        return f"no plan that stays would have been faster: this run had {which}; {basis}"
    share = f"{100 * abs(lost):.0f} % ± {100 * half:.0f}"
    best = f"the best plan that stays, in hindsight ({row.plan})"
    if abs(lost) < half:
        apart = f"{share} {'faster' if lost >= 0 else 'slower'}, which may be none"
        return f"no difference seen between this run and {best}: that one {apart}; {basis}"
    how, over = ("lost", "to") if lost >= 0 else ("gained", "over")
    return f"this run {how} {share} {over} {best}; {basis}"
