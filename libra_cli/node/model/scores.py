"""What trajectories of one group are compared by: sums over trajectories, and means over groups.

A trajectory may have several branches, a group's trajectories may be on several ranks. Each rank
computes the sums of its branches; from those of all ranks every rank makes the same ``Scores``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra_cli.node.batch.samples import Scores, TokenSample


@dataclass(frozen=True, slots=True)
class BranchScores:
    """Scores of one branch of N tokens that count, as the rank that has it computed them."""

    proximal: NDArray[np.float32]
    """``[N]``: log-probabilities before the first update of the step, in nats."""
    reference: NDArray[np.float32]
    """``[N]``: log-probabilities of the model at the start of the run, in nats; 0 without one."""
    value: float
    """The sum of the loss's ``group_value`` over the tokens; 0 if it has none."""
    kl: float
    """The sum of proximal - reference (k1), nats."""


def with_scores(
    samples: Sequence[TokenSample],
    found: Mapping[int, BranchScores],
    *,
    leave_one_out: bool = False,
) -> list[TokenSample]:
    """The samples with their scores; ``found`` has those of each, by its index.

    KL is compared with the mean of the group or, with ``leave_one_out``, of the trajectory's
    others. Samples that have been scored before the first update keep what is of then, and are
    given the values of now.
    """
    values = _by_trajectory(samples, lambda index: found[index].value)
    tokens = _by_trajectory(samples, lambda index: samples[index].generated)
    excess = _excess(_by_trajectory(samples, lambda index: found[index].kl), leave_one_out)
    means = {group: mean_of(members) for group, members in _members(values).items()}
    scored = []
    for index, sample in enumerate(samples):
        branch, whole = found[index], sample.trajectory
        before = sample.scores or Scores(branch.proximal, branch.reference, excess_kl=excess[whole])
        now = replace(
            before,
            own_value=values[whole],
            own_tokens=round(tokens[whole]),
            group_mean=means[sample.group],
        )
        scored.append(replace(sample, scores=now))
    return scored


def mean_of(values: Sequence[float]) -> float:
    """The mean; of infinities of both signs, at which ``fmean`` raises, it is not a number."""
    return sum(values) / len(values)


def _excess(
    own: Mapping[tuple[int, int], float], leave_one_out: bool
) -> dict[tuple[int, int], float]:
    """Return each trajectory's value less the mean it is compared with; a lone one has 0."""
    members = _members(own)
    return {
        (group, member): (value - mean_of(members[group])) * _share(members[group], leave_one_out)
        for (group, member), value in own.items()
    }


def _share(members: Sequence[float], leave_one_out: bool) -> float:
    """What turns the distance from the mean of all n into that from the mean of the others."""
    count = len(members)
    return count / (count - 1) if leave_one_out and count > 1 else 1.0


def _by_trajectory(
    samples: Sequence[TokenSample], of_branch: Callable[[int], float]
) -> dict[tuple[int, int], float]:
    totals: dict[tuple[int, int], float] = {}
    for index, sample in enumerate(samples):
        totals[sample.trajectory] = totals.get(sample.trajectory, 0.0) + of_branch(index)
    return totals


def _members(own: Mapping[tuple[int, int], float]) -> dict[int, list[float]]:
    members: dict[int, list[float]] = {}
    for (group, _), value in own.items():
        members.setdefault(group, []).append(value)
    return members
