"""What an advantage estimator is: a pure function of how the trajectories of a batch ended.

    def best_of_group(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
        return [
            [(float(one.reward == max(m.reward for m in group.members)),) for one in group.members]
            for group in groups
        ]

**What it is given.** The groups of a batch, or of the part of one that is trained now (with
``training.stream``), and the recipe's ``training``. Of each member there is an ``Outcome``: its
reward, its generated tokens, and its turns with their rewards.

**What it returns.** Of each member of each group, in the same order, its advantages: a tuple of one
for the whole trajectory, or of one for each of its turns. Every generated token has that of its
turn.

**What it may depend on.** Nothing but its arguments, so that the same batch after a failure has the
same advantages. A baseline, which is what is taken from a reward, may depend on what was known
before the action that it is taken from, and on other trajectories, without a bias of the gradient
(Williams 1992).

**Late members.** ``before`` is not empty for members of a group that was closed without them: these
are the others. They are compared with those, and never with one another: the others have been too
(``core.rollout.staleness``).

**How a recipe names it.** ``training.advantage`` is a name that ships with libra, an entry point of
group ``libra.advantages``, or ``package.module:attribute``; the controller imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from libra_cli.config.training import TrainingSpec
from libra_cli.core.types import Outcome


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """Members of a group that are trained together."""

    members: tuple[Outcome, ...]
    before: tuple[Outcome, ...] = ()
    """If ``members`` are late: the members that the group was closed with, else empty."""

    @property
    def compared(self) -> tuple[Outcome, ...]:
        """The outcomes whose rewards make the baseline: ``before``, or else ``members``."""
        return self.before or self.members

    @property
    def everyone(self) -> tuple[Outcome, ...]:
        """All trajectories of the group that have ended."""
        return (*self.before, *self.members)


Estimate: TypeAlias = Sequence[Sequence[tuple[float, ...]]]
"""The advantages of each member of each group, in the order given."""
Estimator: TypeAlias = Callable[[Sequence[ComparedGroup], TrainingSpec], Estimate]
