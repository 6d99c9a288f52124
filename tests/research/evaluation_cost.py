# ruff: noqa: T201
"""What evaluations cost the training beside them.

    python -m tests.research.evaluation_cost RUN_DIR...     by the figures of one run
    python -m tests.research.evaluation_cost --simulated    in the simulator, against runs without

Of each run it compares the steps during which an evaluation was played for half of their time or
more with the others: seconds from the end of one step to the end of the next, and trained tokens a
second. The intervals (95 %) are of a bootstrap over blocks of three neighbouring steps, since
neighbours are alike. The first step is left out: it waits for the servers' first trajectories.

The simulated runs are pairs of ten seeds, each with the same trajectories with an evaluation of two
steps' trajectories every ten steps and without one, where training takes less time than rollout,
about as much, and more. Intervals are Student's, over the ratios of the pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

from libra_cli.api import load_run
from libra_cli.config.environment import EvaluationSpec
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import Seconds, TrajectoryId, is_evaluation
from libra_cli.plugins.finding import find
from libra_cli.sim.traces import RecordedEpisode
from libra_cli.sim.world import World
from tests.sim_scene import made_up, scene

BLOCK = 3
"""Steps."""
DRAWS = 10_000


SEEDS = 10
STUDENT = 2.262
"""The 97.5th percentile of Student's distribution with nine degrees of freedom."""
STEPS = 40
TRAINING_S = (2.0, 10.0, 25.0)
BESIDE = EvaluationSpec(num_tasks=8, samples=4, every=10, at_start=False, at_end=False)


class Step(NamedTuple):
    """One step, from the end of the one before."""

    seconds: float
    tokens: float
    evaluated: float
    """The share of its time in which an evaluation was played."""


def steps_of(run_dir: Path) -> list[Step]:
    """The steps of a run from the second on."""
    run = load_run(run_dir)
    spans = [
        (one.started_at, inf if one.ended_at is None else one.ended_at) for one in run.evaluations
    ]
    found = []
    for before, step in pairwise(run.steps):
        began, ended = before.ended_at, step.ended_at
        inside = sum(max(0.0, min(ended, end) - max(began, start)) for start, end in spans)
        seconds = ended - began
        found.append(Step(seconds, step.metrics["batch/generated_tokens"], inside / seconds))
    return found


def mean_s(steps: Sequence[Step]) -> float:
    """Seconds a step."""
    return sum(step.seconds for step in steps) / len(steps)


def rate(steps: Sequence[Step]) -> float:
    """Trained tokens a second."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def ratio(
    figure: Callable[[Sequence[Step]], float], beside: Sequence[Step], without: Sequence[Step]
) -> tuple[float, float, float]:
    """Of a figure beside evaluations and without: the ratio and its interval."""
    rng = Random(0)

    def drawn(steps: Sequence[Step]) -> list[Step]:
        blocks = [steps[at : at + BLOCK] for at in range(0, len(steps), BLOCK)]
        return [step for _ in blocks for step in rng.choice(blocks)]

    draws = sorted(figure(drawn(beside)) / figure(drawn(without)) for _ in range(DRAWS))
    low, high = draws[int(0.025 * DRAWS)], draws[int(0.975 * DRAWS)]
    return figure(beside) / figure(without), low, high


def told(name: str, steps: Sequence[Step]) -> str:
    """One line."""
    return (
        f"  {name}: {len(steps)} steps, {mean_s(steps):.2f} s a step, "
        f"{rate(steps):.0f} trained tokens/s"
    )


def draw_apart(world: World, episodes: Sequence[RecordedEpisode]) -> None:
    """Draw what evaluations play apart, so that training has the same trajectories without one."""
    of_training = world.episodes.episode

    def episode(trajectory: TrajectoryId) -> RecordedEpisode:
        if is_evaluation(trajectory.group):
            return Random(trajectory.group).choice(episodes)
        return of_training(trajectory)

    world.episodes.episode = episode  # type: ignore[method-assign]


class Simulated(NamedTuple):
    """A simulated run, from its first step on."""

    step_s: Seconds
    tokens_per_s: float
    evaluated: float
    """Generated tokens of evaluations, over those that were trained."""


def simulated(seed: int, training_s: Seconds, *evaluation: EvaluationSpec) -> Simulated:
    """Play one."""
    here = scene(steps=STEPS)
    here = replace(
        here,
        recipe=here.recipe.model_copy(update={"evaluation": evaluation}),
        train_s=lambda samples, gpus: training_s * len(samples) / 16,
    )
    trace = made_up(seed, 600)
    policy = find(POLICIES, here.recipe.scheduler.policy)()
    world = World(here, policy, trace.groups(Random(seed), 4))
    draw_apart(world, trace.episodes)
    played = world.run()
    first, *rest = played.steps
    seconds, trained = rest[-1].ended_at - first.ended_at, sum(s.generated_tokens for s in rest)
    ended = (one for one in played.trajectories if is_evaluation(one.group_id))
    return Simulated(
        seconds / len(rest), trained / seconds, sum(one.generated_tokens for one in ended) / trained
    )


def simulate() -> None:
    """Print the ratios of pairs, with an evaluation over without."""
    for training_s in TRAINING_S:
        without = [simulated(seed, training_s) for seed in range(SEEDS)]
        beside = [simulated(seed, training_s, BESIDE) for seed in range(SEEDS)]
        steps = [one.step_s / other.step_s for one, other in zip(beside, without, strict=True)]
        rates = [
            one.tokens_per_s / other.tokens_per_s
            for one, other in zip(beside, without, strict=True)
        ]
        print(
            f"training of {training_s:g} s a step: {fmean(one.step_s for one in without):.1f} s a "
            f"step without an evaluation; with {fmean(one.evaluated for one in beside):.0%} more "
            f"tokens evaluated {_mean(steps)} times that, {_mean(rates)} times the tokens/s"
        )


def _mean(ratios: Sequence[float]) -> str:
    return f"{fmean(ratios):.3f} ± {STUDENT * stdev(ratios) / sqrt(len(ratios)):.3f}"


def main() -> None:
    """Print the figures of each run that is named, or of simulated ones."""
    if sys.argv[1:] == ["--simulated"]:
        simulate()
        return
    for argument in sys.argv[1:]:
        steps = steps_of(Path(argument))
        beside = [step for step in steps if step.evaluated >= 0.5]
        without = [step for step in steps if step.evaluated < 0.5]
        print(argument)
        print(told("all", steps))
        if not (beside and without):
            continue
        print(told("beside an evaluation", beside))
        print(told("without one", without))
        for name, figure in (("seconds a step", mean_s), ("trained tokens/s", rate)):
            value, low, high = ratio(figure, beside, without)
            print(f"  {name}, beside over without: {value:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
