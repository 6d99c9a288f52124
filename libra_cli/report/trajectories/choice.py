"""Finds the trajectories that a step trained, and the one that is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from libra_cli.config.errors import WrongRun
from libra_cli.core.records import GroupRecord, LateRecord, TrajectoryRecord
from libra_cli.core.types import EVALUATION_GROUPS, TrajectoryId
from libra_cli.runtime.store.reader import Reader

NEWEST = 64
"""Trajectories that are shown of a run which has not taken a step yet."""


@dataclass(frozen=True, slots=True)
class PlayedTrajectory:
    """A trajectory that has ended, the step that trained it, and how it compares with its group."""

    row: TrajectoryRecord
    step: int | None
    """The step that trained it; None if none has."""
    over_group: float
    """The reward less the mean of the group's, as far as its members have ended."""

    @property
    def id(self) -> TrajectoryId:
        return TrajectoryId(self.row.group_id, self.row.member, self.row.attempt)

    @property
    def reward(self) -> float:
        """The reward, where 0 stands for a trajectory that has none."""
        return self.row.reward or 0.0


Ranking = Callable[[PlayedTrajectory], float]
RANKINGS: Final[Mapping[str, Ranking]] = {
    "best": lambda one: one.reward,
    "worst": lambda one: -one.reward,
    "longest": lambda one: float(one.row.generated_tokens),
}
"""What the first of a step is called by: the largest; of equals the first one."""


def step_to_show(reader: Reader, asked: int | None) -> int | None:
    """The step that was asked for, or the newest with trajectories; None if none has any.

    Raises:
        WrongRun: the run has not taken the step that was asked for.
    """
    if asked is None:
        newest = reader.rows(GroupRecord, "step IS NOT NULL", order="step DESC LIMIT 1")
        return newest[0].step if newest else None
    steps = [step.step for step in reader.steps()]
    if asked not in steps:
        known = f"it has taken {steps[0]} to {steps[-1]}" if steps else "it has taken none yet"
        raise WrongRun(
            f"{reader.run_dir} has no step {asked}: {known}",
            hint=f"libra show {reader.run_dir} (the newest)",
        )
    return asked


def trained_in(reader: Reader, step: int | None) -> list[PlayedTrajectory]:
    """The trajectories that a step was trained on; without one, the newest that have ended."""
    if step is None:
        newest = f"state = 'finished' AND group_id < {EVALUATION_GROUPS}"
        rows = reader.rows(TrajectoryRecord, newest, order=f"ended_at DESC LIMIT {NEWEST}")
        return _compared(rows, {})
    groups = "SELECT group_id FROM {} WHERE step = ?"
    where = f"group_id IN ({groups.format('groups')} UNION {groups.format('late')})"
    rows = reader.rows(TrajectoryRecord, where, (step, step))
    late = reader.rows(LateRecord, where, (step, step))
    elsewhere = {(row.group_id, row.member): row.step for row in late}
    trained = _steps_of(reader, rows)
    steps = {
        _key(row): elsewhere.get((row.group_id, row.member), trained.get(row.group_id))
        for row in rows
    }
    return [one for one in _compared(rows, steps) if one.step == step]


def find(reader: Reader, name: str) -> PlayedTrajectory:
    """The trajectory of that name: ``17.3`` is the last attempt at member 3 of group 17.

    Raises:
        WrongRun: there is none, or it has not ended.
    """
    if not re.fullmatch(r"\d{1,18}\.\d+(\.\d+)?", name):  # SQLite has 64 bits
        raise WrongRun(
            f"{name!r} names no trajectory",
            hint="libra show lists them; a name is like 17.3, or 17.3.1 for the second attempt",
        )
    group, member, *attempt = map(int, name.split("."))
    rows = reader.rows(TrajectoryRecord, "group_id = ?", (group,))
    asked = [row for row in rows if row.member == member and attempt in ([], [row.attempt])]
    if not asked:
        raise WrongRun(
            f"{reader.run_dir} has no trajectory {name}", hint=f"libra show {reader.run_dir}"
        )
    if asked[-1].state == "running":
        raise WrongRun(
            f"trajectory {name} is still played; its tokens are written when it ends",
            hint=f"libra show {reader.run_dir} (those of the newest step)",
        )
    row = asked[-1]
    step = None
    last = _last_finished(rows)
    if last.get((group, member)) is row:
        late = reader.rows(LateRecord, "group_id = ? AND member = ?", (group, member))
        step = late[0].step if late else _steps_of(reader, rows).get(group)
    return PlayedTrajectory(row, step, _over_group(row, _means(last)))


def have_one_reward(played: Sequence[PlayedTrajectory]) -> bool:
    """Whether there are several and all have the same reward, so that none is the best or worst."""
    return len(played) > 1 and len({one.reward for one in played}) == 1


def first_by(ranking: str, played: Sequence[PlayedTrajectory]) -> PlayedTrajectory:
    """The best, the worst or the longest of these.

    Raises:
        WrongRun: there are none.
    """
    if not played:
        raise WrongRun("no trajectory of it is known", hint="libra show lists the newest step")
    return max(played, key=RANKINGS[ranking])


def _key(row: TrajectoryRecord) -> TrajectoryId:
    return TrajectoryId(row.group_id, row.member, row.attempt)


def _steps_of(reader: Reader, rows: Sequence[TrajectoryRecord]) -> dict[int, int | None]:
    """Return for each group id the step that trained it; None if none has yet."""
    if not rows:
        return {}
    low, high = min(row.group_id for row in rows), max(row.group_id for row in rows)
    groups = reader.rows(GroupRecord, "group_id BETWEEN ? AND ?", (low, high))
    return {group.group_id: group.step for group in groups}


def _compared(
    rows: Sequence[TrajectoryRecord], steps: Mapping[TrajectoryId, int | None]
) -> list[PlayedTrajectory]:
    """Compare those whose last attempt has finished with their group's mean."""
    last = _last_finished(rows)
    means = _means(last)
    return [
        PlayedTrajectory(row, steps.get(_key(row)), _over_group(row, means))
        for row in rows
        if last.get((row.group_id, row.member)) is row
    ]


def _last_finished(
    rows: Sequence[TrajectoryRecord],
) -> dict[tuple[int, int], TrajectoryRecord]:
    """Return the last attempt of each member where it has finished, by group and member.

    A group that grew too old is played again under its number: what an attempt before the last one
    came to is trained by no step, also where the last one failed.
    """
    attempts = sorted(rows, key=lambda row: row.attempt)
    last = {(row.group_id, row.member): row for row in attempts}
    return {who: row for who, row in last.items() if row.state == "finished"}


def _means(last: Mapping[tuple[int, int], TrajectoryRecord]) -> dict[int, float]:
    """Return the mean reward of each group whose members these are."""
    rewards: dict[int, list[float]] = {}
    for row in last.values():
        rewards.setdefault(row.group_id, []).append(row.reward or 0.0)
    return {group: fmean(values) for group, values in rewards.items()}


def _over_group(row: TrajectoryRecord, means: Mapping[int, float]) -> float:
    """Return the reward less the group's mean; 0 where the group has none."""
    reward = row.reward or 0.0
    return reward - means.get(row.group_id, reward)
