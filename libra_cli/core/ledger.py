"""Groups of trajectories, from the prompt stream to the optimizer: trained once, or said why not.

    queue ---open---> OPEN ---last member ends---> READY ---claim---> CLAIMED ---step---> TRAINED
      ^                 |                            |                   |                   |
      |     retries used up: DROPPED          too old: back to      trainer died: READY  (rollback)
      |                                        the queue
      +--- the next prompt of the stream, or one that has to be played again

Staleness bound (after AReaL): with ``B`` groups a step and bound ``eta``, a group may be opened
only while ``open + ready + claimed < (eta + 1) * B``. Consumed in order, a group opened at version
v is then trained at v + eta at the latest. A straggler that is older when a batch is made is not
trained: its prompt goes back to the queue, so that long trajectories are not silently lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from libra_cli.core.types import GroupId, Seconds, Trajectory, TrajectoryId, Version


class GroupState(StrEnum):
    """Where a group is on its way to the optimizer."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"
    STALE = "stale"


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt; ``members`` are in order, each its latest attempt."""

    id: GroupId
    members: list[Trajectory]
    started_at: Seconds
    started_version: Version
    state: GroupState = GroupState.OPEN
    step: int | None = None
    #: The oldest version that produced a token of it; known once it is READY.
    oldest: Version = 0

    @property
    def reward(self) -> float | None:
        """Mean reward, once every member has one."""
        rewards = [member.reward for member in self.members if member.reward is not None]
        return sum(rewards) / len(rewards) if len(rewards) == len(self.members) else None


@dataclass(slots=True)
class Ledger:
    """Every group that is not yet safe in a checkpoint."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    retries: int
    next_group: GroupId = 0
    groups: dict[GroupId, Group] = field(default_factory=dict)
    queue: deque[GroupId] = field(default_factory=deque)
    #: Trajectories that have no reward yet, in open groups.
    playing: int = 0
    _attempts: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    #: Failures of members of open groups; playing again because of age is none.
    _failures: dict[tuple[GroupId, int], int] = field(default_factory=dict)

    def count(self, *states: GroupState) -> int:
        """How many groups are in one of these states."""
        return sum(group.state in states for group in self.groups.values())

    @property
    def may_open(self) -> bool:
        """Whether the staleness bound admits one more group."""
        pending = self.count(GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
        return pending < (self.max_staleness + 1) * self.groups_per_step

    def open(self, *, version: Version, now: Seconds) -> Group:
        """Start the next group: one that has to be played again, or the next of the stream."""
        if self.queue:
            group_id = self.queue.popleft()
        else:
            group_id, self.next_group = self.next_group, self.next_group + 1
        members = [self._new_member(group_id, member, now) for member in range(self.group_size)]
        group = Group(group_id, members, started_at=now, started_version=version)
        self.groups[group_id] = group
        self.playing += self.group_size
        return group

    def _new_member(self, group: GroupId, member: int, now: Seconds) -> Trajectory:
        attempt = self._attempts.get((group, member), 0)
        self._attempts[group, member] = attempt + 1
        return Trajectory(TrajectoryId(group, member, attempt), started_at=now)

    def find(self, trajectory: TrajectoryId) -> Trajectory | None:
        """The trajectory, if it is still the one being played; None for an old or ended one."""
        group = self.groups.get(trajectory.group)
        if group is None or group.state is not GroupState.OPEN:
            return None
        current = group.members[trajectory.member]
        return current if current.id == trajectory and current.reward is None else None

    def finish(self, trajectory: TrajectoryId, reward: float) -> Group:
        """A member has its reward; the group is READY when it was the last."""
        group = self.groups[trajectory.group]
        group.members[trajectory.member].reward = reward
        self.playing -= 1
        if group.reward is not None:
            group.state = GroupState.READY
            versions = [member.min_version for member in group.members]
            known = [version for version in versions if version is not None]
            group.oldest = min(known, default=group.started_version)
        return group

    def replay(self, trajectory: TrajectoryId, *, now: Seconds) -> Trajectory | None:
        """Play a broken trajectory again from its prompt; None when that drops the group.

        A failure is never scored: after ``retries`` attempts the whole group goes, so that no
        baseline is computed over the lucky members only.
        """
        group = self.groups[trajectory.group]
        who = (group.id, trajectory.member)
        self._failures[who] = self._failures.get(who, 0) + 1
        if self._failures[who] > self.retries:
            group.state = GroupState.DROPPED
            self.playing -= sum(member.reward is None for member in group.members)
            self._forget(group)
            return None
        group.members[trajectory.member] = self._new_member(group.id, trajectory.member, now)
        return group.members[trajectory.member]

    def expire(self, version: Version) -> list[Group]:
        """Send READY groups that are too old for the next step back to the queue."""
        stale = [
            group
            for group in self.groups.values()
            if group.state is GroupState.READY and version - group.oldest > self.max_staleness
        ]
        for group in stale:
            group.state = GroupState.STALE
            del self.groups[group.id]
            self.queue.append(group.id)
        return stale

    def claim(self, step: int) -> list[Group]:
        """The batch of this step, oldest groups first; empty while there are too few."""
        ready = [group for group in self.groups.values() if group.state is GroupState.READY]
        if len(ready) < self.groups_per_step:
            return []
        batch = sorted(ready, key=lambda group: (group.oldest, group.id))[: self.groups_per_step]
        for group in batch:
            group.state, group.step = GroupState.CLAIMED, step
        return batch

    def trained(self, step: int) -> list[Group]:
        """The step is done: its groups are TRAINED, and kept until a checkpoint holds them."""
        done = [group for group in self.groups.values() if group.step == step]
        for group in done:
            group.state = GroupState.TRAINED
        return done

    def settle(self, step: int) -> None:
        """A checkpoint holds everything up to ``step``: forget those groups."""
        for group in list(self.groups.values()):
            if group.state is GroupState.TRAINED and (group.step or 0) <= step:
                self._forget(group)

    def _forget(self, group: Group) -> None:
        del self.groups[group.id]
        for member in range(self.group_size):
            self._attempts.pop((group.id, member), None)
            self._failures.pop((group.id, member), None)

    def rollback(self, step: int) -> None:
        """The trainer is back at ``step``: what it had trained or claimed since is READY again."""
        for group in self.groups.values():
            if group.step is not None and group.step > step:
                group.state, group.step = GroupState.READY, None

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` must know to go on with exactly the prompts left."""
        waiting = [
            group.id for group in self.groups.values() if group.step is None or group.step > step
        ]
        return {
            "step": step,
            "next_group": self.next_group,
            "queue": sorted([*waiting, *self.queue]),
        }

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from a checkpoint; groups that were in flight are played again."""
        self.next_group = int(position["next_group"])
        self.queue = deque(int(group) for group in position["queue"])

    def check(self) -> None:
        """Invariants that hold between any two events."""
        assert not set(self.queue) & set(self.groups), "a group is both queued and alive"
        assert all(group < self.next_group for group in [*self.queue, *self.groups])
        unrewarded = [m for g in self.groups.values() for m in g.members if m.reward is None]
        assert self.playing == len(unrewarded), f"{self.playing} playing, {len(unrewarded)} found"
        for group in self.groups.values():
            claimed = group.state in (GroupState.CLAIMED, GroupState.TRAINED)
            assert claimed == (group.step is not None), f"group {group.id}: {group.state}"
            assert (group.state is GroupState.OPEN) == (group.reward is None), group.id
