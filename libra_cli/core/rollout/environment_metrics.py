"""What a step's trajectories say of their environments, as it stands in ``StepRecord.metrics``.

Of a run with one environment, the mean of each number that the environment itself named::

    env/NAME

Of a run with several, for each, by the name it has in the recipe::

    env/ENVIRONMENT/reward          mean
    env/ENVIRONMENT/turns           mean
    env/ENVIRONMENT/share           of the step's trajectories
    env/ENVIRONMENT/truncated       of its trajectories: cut by a limit
    env/ENVIRONMENT/frac_zero_std   of its groups: all rewards are the same
    env/ENVIRONMENT/NAME            mean of what it named itself

A mean is over the trajectories that have the number. Where an environment names one of ours itself,
ours is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from libra_cli.core.advantages.protocol import ComparedGroup
from libra_cli.core.advantages.roles import by_role
from libra_cli.core.sampling.dynamic import has_signal
from libra_cli.core.types import GroupId, Outcome, Trajectory


def environment_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    """The means over a step's trajectories, by name."""
    environments: dict[str, list[Trajectory]] = {}
    for member in members:
        environments.setdefault(member.environment, []).append(member)
    found: dict[str, float] = {}
    for name, played in environments.items():
        prefix = f"env/{name}/" if name else "env/"
        numbers = _means(member.metrics for member in played)
        if name:
            numbers |= _of_several(played, len(members))
        found |= {f"{prefix}{each}": value for each, value in numbers.items()}
    return found


def _of_several(played: Sequence[Trajectory], all_members: int) -> dict[str, float]:
    return {
        "reward": fmean(member.reward or 0.0 for member in played),
        "turns": fmean(member.turns for member in played),
        "share": len(played) / all_members,
        "truncated": fmean(member.truncated for member in played),
        "frac_zero_std": _without_signal(played),
    }


def _without_signal(played: Sequence[Trajectory]) -> float:
    groups: dict[GroupId, list[Outcome]] = {}
    for member in played:
        groups.setdefault(member.id.group, []).append(member.outcome)
    parts = (by_role(ComparedGroup(tuple(members))) for members in groups.values())
    return fmean(
        not any(has_signal([one.reward for one in part.members]) for part in of_group)
        for of_group in parts
    )


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in values.items()}
