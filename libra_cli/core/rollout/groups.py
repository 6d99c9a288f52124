"""Groups of trajectories, from the prompt stream to the optimizer: trained once, or said why not.

    queue ---open---> OPEN ---last member ends---> READY ---claim---> CLAIMED ---step---> TRAINED
      ^                 |                            |                   |                   |
      |     retries used up: DROPPED          too old: back to      trainer died: READY  (rollback)
      |                                        the queue
      +--- the next prompt of the stream, or one that has to be played again

Staleness bound (after AReaL, arXiv 2505.24298): with ``B`` groups a step and bound ``eta``, a
group may be opened only while ``open + ready + claimed < (eta + 1) * B``. Consumed in order, a
group opened at version v is then trained at v + eta at the latest. A straggler that is older when
a batch is made is not trained: its prompt goes back to the queue, so that long trajectories are
not silently lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from libra_cli.core.lifecycle import follow
from libra_cli.core.types import GroupId, Seconds, Trajectory, TrajectoryId, Version


class GroupState(StrEnum):
    """Where a group is on its way to the optimizer."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"
    STALE = "stale"


S = GroupState

TRANSITIONS: dict[GroupState, dict[GroupState, str]] = {
    S.OPEN: {
        S.READY: "its last member has a reward",
        S.DROPPED: "the retries of a member are used up",
    },
    S.READY: {
        S.CLAIMED: "a step takes it",
        S.STALE: "it is too old for the next step: its prompt goes back to the queue",
    },
    S.CLAIMED: {
        S.TRAINED: "the step is done",
        S.READY: "the trainer died before the step was done",
    },
    S.TRAINED: {
        S.READY: "the trainer died and is back at a checkpoint before that step",
    },
    S.DROPPED: {},
    S.STALE: {},
}


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

    def __str__(self) -> str:
        return f"group {self.id}"

    @property
    def reward(self) -> float | None:
        """Mean reward, once every member has one."""
        rewards = [member.reward for member in self.members if member.reward is not None]
        return sum(rewards) / len(rewards) if len(rewards) == len(self.members) else None


def new_trajectory(trajectory: TrajectoryId, now: Seconds) -> Trajectory:
    """A trajectory without a token yet."""
    return Trajectory(trajectory, started_at=now)


def _oldest(group: Group, none: Version) -> Version:
    """The oldest version that has produced a token of it so far; ``none`` if no token is there."""
    versions = [member.min_version for member in group.members]
    return min((version for version in versions if version is not None), default=none)


@dataclass(slots=True)
class GroupLedger:
    """Every group that is not yet safe in a checkpoint."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    retries: int
    #: How a new trajectory is made; a simulator has ones that only count their tokens.
    make: Callable[[TrajectoryId, Seconds], Trajectory] = new_trajectory
    next_group: GroupId = 0
    groups: dict[GroupId, Group] = field(default_factory=dict)
    queue: deque[GroupId] = field(default_factory=deque)
    #: Trajectories that have no reward yet, in open groups.
    playing: int = 0
    _attempts: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    #: Failures of members of open groups; playing again because of age is none.
    _failures: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    #: Whether a group has changed its state since the trainer last asked for a batch.
    _unclaimed_change: bool = True
    #: How many groups are in each state, and what is asked of that at every event: how many are on
    #: their way to the optimizer, and how many are READY.
    _counts: Counter[GroupState] = field(default_factory=Counter)
    _pending: int = 0
    _ready: int = 0

    def count(self, *states: GroupState) -> int:
        """How many groups are in one of these states."""
        return sum(self._counts[state] for state in states)

    def _enter(self, group: Group, state: GroupState) -> None:
        before, group.state = group.state, follow(TRANSITIONS, group.state, state, group)
        self._add(before, -1)
        self._add(state, 1)
        self._unclaimed_change = True

    def _add(self, state: GroupState, change: int) -> None:
        self._counts[state] += change
        self._pending = self.count(GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
        self._ready = self._counts[GroupState.READY]

    @property
    def may_open(self) -> bool:
        """Whether the staleness bound admits one more group."""
        return self._pending < (self.max_staleness + 1) * self.groups_per_step

    @property
    def batch_is_full(self) -> bool:
        """Whether enough groups for a step are READY, or in it already."""
        return self._ready >= self._open_places

    def open(self, *, version: Version, now: Seconds) -> Group:
        """Start the next group: one that has to be played again, or the next of the stream."""
        if self.queue:
            group_id = self.queue.popleft()
        else:
            group_id, self.next_group = self.next_group, self.next_group + 1
        members = [self._new_member(group_id, member, now) for member in range(self.group_size)]
        group = Group(group_id, members, started_at=now, started_version=version)
        self.groups[group_id] = group
        self._add(group.state, 1)
        self.playing += self.group_size
        return group

    def _new_member(self, group: GroupId, member: int, now: Seconds) -> Trajectory:
        attempt = self._attempts.get((group, member), 0)
        self._attempts[group, member] = attempt + 1
        return self.make(TrajectoryId(group, member, attempt), now)

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
            self._enter(group, GroupState.READY)
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
            self._enter(group, GroupState.DROPPED)
            self.playing -= sum(member.reward is None for member in group.members)
            self._forget(group)
            return None
        group.members[trajectory.member] = self._new_member(group.id, trajectory.member, now)
        return group.members[trajectory.member]

    def expire(self, version: Version) -> list[Group]:
        """Send READY groups that are too old for the next step back to the queue."""
        if not self._unclaimed_change or not self._ready:
            return []
        stale = [
            group
            for group in self.groups.values()
            if group.state is GroupState.READY and version - group.oldest > self.max_staleness
        ]
        for group in stale:
            self._enter(group, GroupState.STALE)
            self._drop(group)
            self.queue.append(group.id)
        return stale

    def claim(self, step: int) -> list[Group]:
        """The batch of this step, oldest groups first; empty while there are too few.

        It is also empty while a group is still played that this step is the last one for: to wait
        for it is cheaper than to throw it away and play it again.
        """
        changed, self._unclaimed_change = self._unclaimed_change, False
        if not changed or not self.batch_is_full:
            return []
        if self._last_calls_for(step):
            return []
        return self._claim(step, self._open_places)

    def claim_part(self, step: int, *, least: int) -> list[Group]:
        """Groups of this step's batch that are READY before it is full: at least so many, or none.

        Places are left for groups still played that this step is the last one for.
        """
        if not self._ready or self.batch_is_full:
            return []
        free = self._open_places - self._last_calls_for(step)
        return self._claim(step, free) if min(free, self._ready) >= least else []

    @property
    def _open_places(self) -> int:
        """In the next step's batch; parts of it may be claimed already."""
        return self.groups_per_step - self._counts[GroupState.CLAIMED]

    def _claim(self, step: int, most: int) -> list[Group]:
        ready = [group for group in self.groups.values() if group.state is GroupState.READY]
        batch = sorted(ready, key=lambda group: (group.oldest, group.id))[:most]
        for group in batch:
            self._enter(group, GroupState.CLAIMED)
            group.step = step
        return batch

    def _last_calls_for(self, step: int) -> int:
        """Groups that are played and would be too old for any later step."""
        bound = step - 1 - self.max_staleness
        played = (group for group in self.groups.values() if group.state is GroupState.OPEN)
        return sum(_oldest(group, bound + 1) <= bound for group in played)

    def trained(self, step: int) -> list[Group]:
        """The step is done: its groups are TRAINED, and kept until a checkpoint holds them."""
        done = [group for group in self.groups.values() if group.step == step]
        for group in done:
            self._enter(group, GroupState.TRAINED)
        return done

    def settle(self, step: int) -> None:
        """A checkpoint holds everything up to ``step``: forget those groups."""
        for group in list(self.groups.values()):
            if group.state is GroupState.TRAINED and (group.step or 0) <= step:
                self._forget(group)

    def _drop(self, group: Group) -> None:
        del self.groups[group.id]
        self._add(group.state, -1)

    def _forget(self, group: Group) -> None:
        self._drop(group)
        for member in range(self.group_size):
            self._attempts.pop((group.id, member), None)
            self._failures.pop((group.id, member), None)

    def rollback(self, step: int) -> None:
        """The trainer is back at ``step``: what it had trained or claimed since is READY again."""
        for group in self.groups.values():
            if group.step is not None and group.step > step:
                self._enter(group, GroupState.READY)
                group.step = None

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
        found = Counter(group.state for group in self.groups.values())
        assert found == +self._counts, f"{found} found, {self._counts} counted"
        pending = self.count(GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
        assert pending == self._pending, f"{pending} on their way, {self._pending} counted"
        assert found[GroupState.READY] == self._ready, f"{self._ready} ready counted"
        for group in self.groups.values():
            claimed = group.state in (GroupState.CLAIMED, GroupState.TRAINED)
            assert claimed == (group.step is not None), f"group {group.id}: {group.state}"
            assert (group.state is GroupState.OPEN) == (group.reward is None), group.id
