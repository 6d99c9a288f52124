"""The regret certificate: what a run lost to the best plan that stays, in hindsight.

The run is simulated as it was and under plans that stay, on its own trajectories and prices, seed
by seed with the same groups. It is told when the run ends, within ``BUDGET_S``: of a long run the
last steps, of many plans those that the prices say are best, and as many seeds as there is time
for.

Limit: as good as the simulation is, whose error is told beside it; of plans that were not simulated
it knows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TypeAlias

from libra_cli.app.what_if.plans import staying_plans, words_of
from libra_cli.app.what_if.reading import WhatIfError, known_of
from libra_cli.app.what_if.trials import SEEDS, Trials, saved
from libra_cli.config.errors import LibraError
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.records import RegretRecord
from libra_cli.core.types import Pool, Seconds
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.played_run import AdoptedPlan
from libra_cli.sim.rerun import Rerun, error_of

LEAST_STEPS = 10
"""Steps of a run of which there is a certificate."""
MOST_TURNS = 3_000
"""Turns that are simulated at most."""
MOST_PLANS = 4
"""Plans that stay of a run which are simulated, by prices the best of all."""
BUDGET_S: Seconds = 8.0
"""Seconds after which no further simulation begins. On an idle core one of ``MOST_TURNS`` takes
0.5 s."""
AGAINST = "static"
ONE_PLAN = "the recipe allows one plan alone: its pools fix what every slot does"
ALIKE = 0.005
"""Shares that are told as 0 %."""


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
    until = time.monotonic() + BUDGET_S
    with Reader(run_dir) as reader:
        taken = reader.run().step
        if taken < LEAST_STEPS:
            raise WhatIfError(f"of {taken} steps, and {LEAST_STEPS} are needed")
        # Before all its turns are read: most recipes on CPUs leave no choice.
        if not any(slot.pool is Pool.HYBRID for slot in slots_of(recipe_of(run_dir))):
            raise WhatIfError(ONE_PLAN)
        known = known_of(reader, most_turns=MOST_TURNS)
    return regret_of(Trials(known), until)


def regret_of(trials: Trials, until: Seconds = inf) -> Found:
    """The certificate by these trials, and what it is from; ``until`` is by the monotonic clock.

    Raises:
        WhatIfError: the recipe allows no other plan, or there was too little time.
        LibraError: none can run.
    """
    began = time.monotonic()
    known = trials.known
    rivals = _rivals(trials)
    seeds = 0
    while seeds < SEEDS and _play(trials, rivals, seeds, until):
        seeds += 1
    if not seeds:
        raise WhatIfError(
            f"{BUDGET_S:.0f} s were too few to simulate {len(known.run.turns):,} turns",
            hint=f"libra bench run {known.run_dir} takes its time",
        )
    best = min(rivals, key=lambda rival: sum(one.pace.step_s for one in rival.played))
    regret = saved([trials.was(seed) for seed in range(seeds)], best.played)
    row = RegretRecord(
        against=AGAINST,
        at=time.time(),
        text="",
        regret=regret.mean,
        ci95=regret.half,
        plan=best.words,
        plans=len(rivals),
        steps=len(known.run.steps),
        seeds=seeds,
        error=error_of(trials.was(0).pace, trials.measured),
        seconds=time.monotonic() - began,
    )
    is_whole = known.run.steps[0].step == 1
    who = "this run" if is_whole else f"in its last {row.steps} steps this run"
    return replace(row, text=_sentence(row, who)), rivals


def _play(trials: Trials, rivals: Sequence[Rival], seed: int, until: Seconds) -> bool:
    """Simulate the run as it was and under each plan; False where there is no time for all."""
    found = []
    for one in (None, *rivals):
        if time.monotonic() > until:
            return False
        played = trials.play(replace(trials.as_it_was, plans=(one.plan,)), seed) if one else None
        found.append(played or trials.was(seed))
    for rival, played in zip(rivals, found[1:], strict=True):
        rival.played.append(played)
    return True


def _rivals(trials: Trials) -> list[Rival]:
    """The plans that stay, the best ones by prices. Raises LibraError where there is no choice."""
    known = trials.known
    samples = known.observation.workload.samples
    plans = staying_plans(trials.priced, samples, MOST_PLANS)
    if len(plans) < 2:
        raise WhatIfError(ONE_PLAN)
    return [Rival(words_of(one.plan, one.slots), one) for one in plans]


def _sentence(row: RegretRecord, who: str) -> str:
    """The certificate in words; ``who`` is the run, or the part of it that was simulated."""
    lost, error = row.regret or 0.0, row.error or 0.0
    spread = "" if row.ci95 is None else f" ± {100 * row.ci95:.0f}"
    basis = f"simulated, {100 * abs(error):.0f} % too {'slow' if error > 0 else 'fast'} as it was"
    if abs(lost) < ALIKE and (row.ci95 or 0.0) < ALIKE:
        which = f"the best of {row.plans} plans that stay, in hindsight ({row.plan})"
        return f"no plan that stays would have been faster: {who} had {which}; {basis}"
    how = "lost" if lost >= 0 else "gained"
    over = "to" if lost >= 0 else "over"
    return (
        f"{who} {how} {100 * abs(lost):.0f} %{spread} {over} the best plan that stays, in "
        f"hindsight ({row.plan}); {basis}"
    )
