"""Makes the machine of a run that begins, or that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from libra_cli.config.recipe import Recipe
from libra_cli.core.algorithms.algorithm import algorithm_of
from libra_cli.core.planning.planner import DecisionMaker, FirstPlan
from libra_cli.core.records import Record
from libra_cli.core.run.machine import Machine
from libra_cli.core.run.state import Resume, RunIdentity
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.plugins.finding import find
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.tasks.mixture import tasks_of
from libra_cli.runtime.trainer.whole_checkpoints import newest_whole


@dataclass(frozen=True, slots=True)
class Planning:
    """How a run is planned on GPUs of given names."""

    first_plan: Callable[[frozenset[str]], FirstPlan]
    """Makes the plan that a run begins with."""
    planner: Callable[[frozenset[str]], DecisionMaker]
    """Makes what looks for better plans while the run goes on."""


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """A run's checkpoints, its last trainer's incarnation and its records, to go on from."""

    names: tuple[str, ...]
    """Names of the checkpoints that the run has told of."""
    trainer_incarnation: int
    records: Sequence[Record]

    async def resume(self, hosts: Mapping[str, Host], note: Callable[[str], None]) -> Resume:
        """Return the newest checkpoint that is whole on these hosts.

        Raises:
            StateError: there is none.
        """
        found = await newest_whole(hosts, self.names, self.trainer_incarnation, note=note)
        return Resume(found.path, found.position, found.trainer_incarnation, self.records)


def new_machine(
    recipe: Recipe, begun_with: FirstPlan, identity: RunIdentity, resume: Resume | None
) -> Machine:
    """Return the machine of a run, to which nothing has happened yet."""
    curriculum = recipe.rollout.curriculum
    counts = curriculum is not None and curriculum.tasks is None
    return Machine(
        algorithm_of(recipe, find),
        begun_with.plan,
        begun_with.slots,
        identity,
        policy=find(POLICIES, recipe.scheduler.policy)(),
        resume=resume,
        explanation=begun_with.explanation,
        tasks=tasks_of(recipe.environment) if counts else 0,
    )
