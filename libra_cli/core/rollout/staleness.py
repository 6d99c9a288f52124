"""The rule that makes a batch: whom a step waits for, and what becomes of those that come late.

A group is **behind** by the versions between its oldest token and the trainer's weights when a step
trains on it. A step is the *last call* for a group that would be behind by more than the rule
allows in the next one. ``bound`` is ``training.max_staleness``, B the groups of a step.

    rule           a step waits at the last call      a finished group that is more behind
    hold           for every group                    is played again
    late: n        for every group, n versions later  is played again
    soft, token    for nobody                         is trained
    cut            until the share ``least`` is done  is trained

*   ``hold`` guarantees that no token is more than ``bound`` versions behind, ``late`` that none is
    more than ``bound + n``. They pay with waiting, and with what is played again.
*   ``soft`` guarantees the mean only. Admission is the same under all rules (``may_open`` of
    ``core.rollout.groups``): at most (bound + 1) B groups are on their way, and B leave with every
    step, so by Little's law the mean group is trained bound + 1 steps after it was opened, and is
    behind by ``bound`` on average; one group may be behind by any number. Stragglers take places
    of this admission and so are few: with a bound of 0 nobody passes anybody, and only a turn that
    was played on a server yet to be synced is behind.
*   ``token`` makes batches as ``soft`` does, and keeps the bound token by token in the loss: tokens
    over it are left out, or weigh at most 1 (``node.losses``).
*   ``cut`` closes a group at its last call and trains its finished members. The others play on and
    are trained in the step after they have all ended (``rest: later``), whatever their age, or are
    given up (``rest: drop``), and then long trajectories are trained less often than played. What
    is played of a rest takes places of the admission, so the mean is bounded here too.

**What a late member is compared with.** For a closed group the baseline of everybody is the mean
reward b of the members that were finished, also for those that end later: the score function's
mean is zero, so a baseline does not bias a policy gradient if it does not depend on the action it
is taken from, and one mean for those that are finished and another for those that are not would
depend on exactly that. With the mean of the whole group for late members, what is learned is off by
(b - mean) times the gradient of the probability of being finished: length would be rewarded.
Weighing finished members up in place of the dropped ones cannot repair ``drop``: inverse
probability weights need every trajectory to have a chance to be finished in time (Horvitz and
Thompson 1952), and the longest have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Literal

from libra_cli.config.training import TrainingSpec
from libra_cli.core.workload import READY_SHARE

LATE_VERSIONS = 1
"""The default of ``versions`` in a recipe."""
LEAST = 0.5
"""The default of ``least`` in a recipe."""


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """The ages at which a rule waits, trains and closes groups.

    Ages are in versions; None is any.
    """

    bound: int
    """The bound ``training.max_staleness``, which admits groups; tokens over it are counted."""
    waits: int | None
    """A step waits for an open group that would be further behind than this in the next one."""
    trains: int | None
    """A finished group that is further behind than this is played again."""
    least: float | None = None
    """A group is closed at its last call once this share of it is finished; None: never."""
    keeps_rest: bool = True
    """Whether what a closed group leaves behind plays on."""

    @property
    def overlap(self) -> float:
        """Steps' worth of groups that may be open, ready or in training at once."""
        return 1.0 + self.bound

    @property
    def late(self) -> float:
        """Versions over the bound from which on a step waits for a group; infinity: it never does.

        Soft is hold with a bound of 0, and a group that may be closed is hardly waited for.
        """
        if self.bound == 0:
            return 0.0
        return inf if self.waits is None or self.least is not None else self.waits - self.bound

    def holders(self, size: int) -> float:
        """The number of members whose places the longest member of a group of ``size`` keeps taken.

        All, or where groups are closed, after which each member keeps its own only, about the
        square root: in the simulator 0.6 and 0.65 of the members of open groups played (tau2 and
        mint, 24 GPUs, rollout the longer half), where the mean over the longest of sqrt(8) is 0.64
        and 0.70; under ``soft`` 0.45 and 0.54, where that over the longest of 8 is 0.43 and 0.53.
        """
        return size if self.least is None else sqrt(size)

    @property
    def ready(self) -> float:
        """Share of a step's trajectories that lie in groups which are ready while a batch fills.

        Half (``READY_SHARE``), but a closed group is trained at once, and with a bound of 1 all are
        closed, with 2 half of those that were opened together, and so on. In the simulator it was
        0.05 to 0.1 and 0.2 to 0.25 at bounds of 1 and 2, and 0.4 to 0.55 where none is closed
        (tau2bench and taubench, 24 GPUs, rollout the longer half).
        """
        closed = 0.0 if self.least is None else 1 / max(1, self.bound)
        return READY_SHARE * (1 - closed)

    def least_of(self, size: int) -> int | None:
        """Return how many of ``size`` members must be finished to close a group; None: it is never
        closed.

        Two at least: one reward by itself is nothing to learn from.
        """
        return None if self.least is None else max(2, ceil(self.least * size))


def hold(bound: int) -> StalenessRule:
    """Return the rule that waits for every group at its last call."""
    return StalenessRule(bound, waits=bound, trains=bound)


def late(bound: int, versions: int = LATE_VERSIONS) -> StalenessRule:
    """Return the rule that waits for a group only when it is about to be
    over the bound by more than ``versions``.
    """
    return StalenessRule(bound, waits=bound + versions, trains=bound + versions)


def soft(bound: int) -> StalenessRule:
    """Return the rule that waits for no group, and trains every group when it comes."""
    return StalenessRule(bound, waits=None, trains=None)


def cut(bound: int, least: float = LEAST, *, keeps_rest: bool = True) -> StalenessRule:
    """Return the rule that closes a group at its last call once the share
    ``least`` of its members is finished.
    """
    return StalenessRule(bound, waits=bound, trains=None, least=least, keeps_rest=keeps_rest)


def rule_of(training: TrainingSpec, bound: int | None = None) -> StalenessRule:
    """Return the staleness rule that ``training.staleness`` names, with its defaults; under
    ``auto`` the one of the ``bound`` that is chosen (None: not yet).
    """
    spec, bound = training.staleness, training.max_staleness if bound is None else bound
    match spec.rule:
        case None | "auto":
            return unnamed(bound)
        case "hold":
            return hold(bound)
        case "late":
            return late(bound, spec.versions or LATE_VERSIONS)
        case "cut":
            return cut(bound, spec.least or LEAST, keeps_rest=spec.rest != "drop")
        case "soft" | "token":
            return soft(bound)


def unnamed(bound: int) -> StalenessRule:
    """Return the rule of a recipe that names none, or has the bound chosen."""
    return hold(bound) if default_rule(bound) == "hold" else cut(bound)


def default_rule(bound: int) -> Literal["hold", "cut"]:
    """The rule of a recipe that names none.

    ``cut`` was quicker than ``hold`` in simulation and live, and learned as well (``libra help
    staleness``). Who asks for a bound of 0 wants no token over it.
    """
    return "cut" if bound else "hold"
