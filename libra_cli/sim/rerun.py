"""A run that took place, played again in virtual time: as it was, or with something changed.

The machine, the policy and the planner are those of production, servers and trainer cost what a
profile says; evaluations are left out. Of what happened only the trajectories are used, and no time
but those of tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from statistics import fmean

from libra_cli.config.recipe import PlannerSpec, Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.server import guessed_cost
from libra_cli.core.launch.shares import serving_when_idle
from libra_cli.core.planning.planner import DecisionMaker
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import Seconds
from libra_cli.plugins.finding import find
from libra_cli.sim.played_run import AdoptedPlan, Pace, turn_seconds
from libra_cli.sim.priced_scene import priced_scene
from libra_cli.sim.traces import RecordedEpisode
from libra_cli.sim.world import World

PART_STEPS = 5
"""Steps of a part of a run whose error is looked at: a single step ends early or late by chance.
Chosen."""
MOST_PARTS = 8
"""Parts of a run; chosen, so that each is as long as what two plans may differ in."""


@dataclass(frozen=True, slots=True)
class RunConditions:
    """What a run is played again with: its recipe, its prices, and who plans.

    ``plans`` begin with the first. Without a ``planner`` each is adopted after as many steps as it
    says. Of ``steps`` a simulation plays ``further`` ones more and does not count them: a run that
    was stopped did not slow down towards its end.
    """

    recipe: Recipe
    profile: Profile
    plans: tuple[AdoptedPlan, ...]
    steps: int
    further: int = 0
    planner: DecisionMaker | None = None

    @property
    def staying(self) -> RunConditions:
        """The same with its first plan from start to end."""
        return replace(self, plans=self.plans[:1], planner=None)


@dataclass(frozen=True, slots=True)
class Rerun:
    """How fast a simulated run was, how long a turn was on a server, and what share of their time
    the servers had nothing to do."""

    pace: Pace
    turn_s: Seconds
    idle_rollout: float
    moves: int


def rerun(given: RunConditions, groups: Iterator[tuple[RecordedEpisode, ...]]) -> Rerun:
    """Play these groups under these conditions.

    Raises:
        LibraError: the simulated run cannot go on.
    """
    first, profile = given.plans[0], given.profile
    shares = serving_when_idle(given.recipe.nodes, first.slots)
    if shares:
        least = min(share.train for share in shares.values())
        profile = replace(profile, training=profile.training.within(least))
    scene = priced_scene(profile, guess_of=guessed_cost)(
        recipe=_recipe(given), plan=first.plan, slots=first.slots
    )
    policy = find(POLICIES, given.recipe.scheduler.policy)()
    world = World(scene, policy, groups, planner=given.planner, plans=_Script(given.plans))
    tape = world.run()
    return Rerun(
        Pace.of(tape.steps[: given.steps]),
        turn_seconds(tape.turns),
        max(0.0, 1 - world.busy_gpu_s() / max(world.served_gpu_s(), 1e-9)),
        sum(move.state == "done" for move in tape.moves.values()),
    )


@dataclass(frozen=True, slots=True)
class _Script:
    """Answers with the newest plan that is due; the machine knows whether it has it already."""

    plans: tuple[AdoptedPlan, ...]

    def __call__(self, asked: a.Propose) -> e.PlanChosen | e.PlanKept:
        due = [one for one in self.plans if one.after_step <= asked.observation.step]
        return e.PlanChosen(due[-1].plan, due[-1].slots, order=asked.order)


def _recipe(given: RunConditions) -> Recipe:
    """The recipe as far as it is simulated; asked after every step where plans are known."""
    recipe = given.recipe
    if given.planner is None:
        moves = len(given.plans) > 1
        planner = PlannerSpec(kind="libra" if moves else "fixed", plan_interval=1)
    else:
        planner = recipe.planner
    run = recipe.run.model_copy(update={"steps": given.steps + given.further})
    return recipe.model_copy(update={"run": run, "planner": planner, "evaluation": ()})


def error_of(simulated: Pace, measured: Pace) -> float:
    """The relative error of the seconds of the run: +0.05 is simulated 5 % too slow."""
    return simulated.step_s / measured.step_s - 1


def part_error_of(simulated: Pace, measured: Pace) -> float:
    """The root mean square of the relative errors of consecutive parts of the run (``parts_of``),
    by their measured seconds."""
    number = number_of_parts(simulated)
    pairs = zip(parts_of(simulated, number), parts_of(measured, number), strict=True)
    errors = [(real, mine / real - 1) for mine, real in pairs if real > 0]
    return sqrt(sum(real * error**2 for real, error in errors) / sum(real for real, _ in errors))


def number_of_parts(pace: Pace) -> int:
    """How many parts of ``PART_STEPS`` steps or more there are, ``MOST_PARTS`` at most."""
    return max(1, min(MOST_PARTS, len(pace.steps_s) // PART_STEPS))


def parts_of(pace: Pace, number: int) -> list[Seconds]:
    """Mean seconds a step of so many consecutive parts."""
    many = len(pace.steps_s)
    edges = [part * many // number for part in range(number + 1)]
    return [fmean(pace.steps_s[begin:end]) for begin, end in pairwise(edges)]


def step_error_of(simulated: Pace, measured: Pace) -> float:
    """The mean size of the relative errors of single steps."""
    pairs = list(zip(simulated.steps_s, measured.steps_s, strict=False))
    return sum(abs(mine / real - 1) for mine, real in pairs) / len(pairs)
