"""The advantages of a batch, as the trainer is sent them and as they are told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from libra_cli.config.errors import PluginError
from libra_cli.core.advantages.protocol import Estimate
from libra_cli.core.types import Trajectory, TrajectoryId

if TYPE_CHECKING:
    from libra_cli.core.rollout.groups import Group

Advantages: TypeAlias = Mapping[TrajectoryId, tuple[float, ...]]
"""One advantage of each whole trajectory, or one of each of its turns, by trajectory."""


def checked(groups: Sequence[Group], estimate: Estimate, name: str) -> Advantages:
    """Return the advantages of the estimator ``name`` by trajectory.

    Raises:
        PluginError: they are not what ``core.advantages.protocol`` asks for.
    """
    found = [list(members) for members in estimate]
    if [len(members) for members in found] != [len(group.members) for group in groups]:
        raise _wrong(name, "did not return advantages for all members of all groups")
    estimated = {
        member.id: values
        for group, members in zip(groups, found, strict=True)
        for member, values in zip(group.members, members, strict=True)
    }
    _check(groups, estimated, name)
    return estimated


def _check(groups: Sequence[Group], estimated: Advantages, name: str) -> None:
    for group in groups:
        for member in group.members:
            values, turns = estimated[member.id], len(member.turn_rewards)
            if len(values) not in (1, turns):
                found = f"{len(values)} advantages for trajectory {member.id} of {turns} turns"
                raise _wrong(name, f"returned {found}: one for the whole, or one for each turn")
            if not all(map(isfinite, values)):
                raise _wrong(name, f"returned {values} for trajectory {member.id}")


def _wrong(name: str, what: str) -> PluginError:
    return PluginError(
        f"advantage estimator {name!r} {what}",
        hint="libra help advantages tells what an estimator returns",
    )


def runs_of(
    trajectory: Trajectory, values: tuple[float, ...], branch: int | None = None
) -> tuple[tuple[int, float], ...]:
    """Return the advantages of a branch as (token, value): from this token on. None: the
    trajectory's own branch.
    """
    if len(values) == 1:
        return ((0, values[0]),)
    number = trajectory.number if branch is None else branch
    return tuple(
        (turn.start, value)
        for turn, value in zip(trajectory.turn_rewards, values, strict=True)
        if turn.branch == number
    )


def advantage_metrics(groups: Sequence[Group], advantages: Advantages) -> dict[str, float | None]:
    """Metrics of a batch: the standard deviation of the advantages of its generated tokens, and the
    share of its groups of which no member has one but 0. Late members count with the first only.
    """
    weighed = [pair for group in groups for pair in _by_tokens(group, advantages)]
    tokens = sum(count for count, _ in weighed)
    mean = sum(count * value for count, value in weighed) / max(1, tokens)
    squares = sum(count * (value - mean) ** 2 for count, value in weighed)
    compared = [group for group in groups if len(group.members) > 1 and not group.is_rest]
    silent = [not any(any(advantages[one.id]) for one in group.members) for group in compared]
    return {
        "advantage_std": sqrt(squares / max(1, tokens)),
        "share_without_signal": fmean(silent) if silent else None,
    }


def _by_tokens(group: Group, advantages: Advantages) -> list[tuple[int, float]]:
    """Return (generated tokens, advantage) of each trajectory of the group, or of each turn."""
    pairs: list[tuple[int, float]] = []
    for member in group.members:
        values = advantages[member.id]
        if len(values) == 1:
            pairs.append((member.generated, values[0]))
        else:
            sizes = [turn.end - turn.start for turn in member.turn_rewards]
            pairs += zip(sizes, values, strict=True)
    return pairs
