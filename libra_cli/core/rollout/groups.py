"""Groups of trajectories, from the prompt stream to the optimizer: trained once, or said why not.

    queue ---open---> OPEN ---last member ends---> READY ---claim---> CLAIMED ---step---> TRAINED
      ^                 |                            |                   |                   |
      |     retries used up: DROPPED          too old: back to      trainer died: READY  (rollback)
      |     no signal: FILTERED                the queue
      +--- the next prompt of the stream, or one that has to be played again

Staleness bound (after AReaL, arXiv 2505.24298): with ``B`` groups a step and bound ``eta``, a
group may be opened only while ``open + ready + claimed < (eta + 1) * B``. Consumed in order, a
group opened at version v is then trained at v + eta at the latest. Whom a step waits for, and what
becomes of a straggler, is the matter of the rule (``core.rollout.staleness``); where one is not
trained its prompt goes back to the queue, so that long trajectories are not silently lost.

A rule may close a group at its last call: it is READY with its finished members, and the others go
on as its *rest*. A rest has the same states and takes no place of a batch: it joins the first one
after that of its group once all its members have ended. Each member that is still played takes its
fraction of a place of the bound.

With ``oversample`` more members are started than a group has: it is READY with the first that end,
and the *surplus* is stopped. With dynamic sampling (``core.sampling.dynamic``) a group, or a rest,
in which all have the same reward is FILTERED instead: it is neither trained nor played again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from libra_cli.core.advantages.protocol import ComparedGroup
from libra_cli.core.lifecycle import follow
from libra_cli.core.model_use import ModelUses
from libra_cli.core.rollout.places import EpisodePlaces
from libra_cli.core.rollout.staleness import StalenessRule
from libra_cli.core.sampling.curriculum import Curriculum
from libra_cli.core.sampling.dynamic import FilteredGroups
from libra_cli.core.types import (
    GroupId,
    Outcome,
    Seconds,
    Tokens,
    Trajectory,
    TrajectoryId,
    TurnReward,
    Version,
)


class GroupState(StrEnum):
    """The states of a group between its prompt and the optimizer."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"
    FILTERED = "filtered"
    STALE = "stale"


S = GroupState
TRAINED_STEPS = 1000
"""Newest steps of which a checkpoint names what each trained, so that a run for weeks does not
write them all each time; the journal has every step's.
"""

TRANSITIONS: dict[GroupState, dict[GroupState, str]] = {
    S.OPEN: {
        S.READY: "its last member has a reward, or it is closed without those that have none",
        S.DROPPED: "the retries of a member are used up, or servers die of it",
        S.FILTERED: "all its members have the same reward, and dynamic sampling is on",
    },
    S.READY: {
        S.CLAIMED: "a step takes it",
        S.STALE: "it is too old for the next step: its prompt goes back to the queue",
    },
    S.CLAIMED: {
        S.TRAINED: "the step is done",
        S.READY: "the trainer died before the step was done",
        S.DROPPED: "the trainer dies of it",
    },
    S.TRAINED: {
        S.READY: "the trainer died and is back at a checkpoint before that step",
    },
    S.DROPPED: {},
    S.FILTERED: {},
    S.STALE: {},
}


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt; ``members`` are in order, each its latest attempt."""

    id: GroupId
    members: list[Trajectory]
    started_at: Seconds
    started_version: Version
    #: The rule that it was opened under, which it keeps.
    rule: StalenessRule
    #: Which task of the stream it plays, where a curriculum has chosen it; else its own number.
    task: int | None = None
    state: GroupState = GroupState.OPEN
    step: int | None = None
    #: The oldest version that produced a token of it; known once it is READY.
    oldest: Version = 0
    #: Members that it was closed without.
    missing: int = 0
    #: Members that were started beyond its size, and stopped when it had enough.
    surplus: int = 0
    #: Of a rest: how the members ended that had ended when the group was closed.
    finished: tuple[Outcome, ...] = ()

    def __str__(self) -> str:
        return f"{'the rest of ' if self.is_rest else ''}group {self.id}"

    @property
    def is_rest(self) -> bool:
        """Whether these are the members that a closed group has left behind."""
        return bool(self.finished)

    def is_too_old(self, version: Version) -> bool:
        """Whether its rule forbids that a step from this version trains it, once it is READY."""
        most = self.rule.trains
        return most is not None and version - self.oldest > most

    def is_at_last_call(self, step: int) -> bool:
        """Whether, while it is played, its rule would have it too old after this step."""
        if self.rule.waits is None:
            return False
        last = step - 1 - self.rule.waits
        return _oldest(self, last + 1) <= last

    @property
    def ended(self) -> list[float]:
        """The rewards of the members that have one."""
        return [member.reward for member in self.members if member.reward is not None]

    @property
    def compared(self) -> ComparedGroup:
        """The members that have ended, as an estimator of advantages sees them."""
        ended = [member.outcome for member in self.members if member.reward is not None]
        return ComparedGroup(tuple(ended), self.finished)

    def place(self, trajectory: TrajectoryId) -> int | None:
        """Return the index of that trajectory, or of another
        attempt at it; None if it is no member.
        """
        for place, one in enumerate(self.members):
            if one.id.member == trajectory.member:
                return place
        return None

    @property
    def reward(self) -> float | None:
        """Mean reward of the members; None until every member has one."""
        ended = self.ended
        return sum(ended) / len(ended) if len(ended) == len(self.members) else None


def _outcome(said: Any) -> Outcome:
    """The outcome as a journal has it; the reward alone, as older ones have it."""
    if isinstance(said, int | float):
        return Outcome(float(said))
    reward, generated, turns = said
    return Outcome(float(reward), int(generated), tuple(TurnReward(*turn) for turn in turns))


def new_trajectory(trajectory: TrajectoryId, now: Seconds) -> Trajectory:
    """Return a trajectory that begins now, without a token yet."""
    return Trajectory(trajectory, started_at=now)


def _oldest(group: Group, none: Version) -> Version:
    """The oldest version that has produced a token of it so far; ``none`` if no token is there."""
    versions = [member.min_version for member in group.members]
    return min((version for version in versions if version is not None), default=none)


@dataclass(slots=True)
class GroupLedger:
    """The groups that are not yet safe in a checkpoint."""

    group_size: int
    groups_per_step: int
    #: What new groups are opened under; those that are under way keep theirs.
    rule: StalenessRule
    retries: int
    #: How a new trajectory is made; a simulator has ones that only count their tokens.
    make: Callable[[TrajectoryId, Seconds], Trajectory] = new_trajectory
    #: Members of each group that are started beyond its size.
    oversample: int = 0
    #: What dynamic sampling has left out.
    filtered: FilteredGroups = field(default_factory=FilteredGroups)
    #: What chooses the tasks of new groups; None: they come in the order of the stream.
    curriculum: Curriculum | None = None
    next_group: GroupId = 0
    groups: dict[GroupId, Group] = field(default_factory=dict)
    #: What closed groups have left behind.
    rests: dict[GroupId, Group] = field(default_factory=dict)
    queue: deque[GroupId] = field(default_factory=deque)
    #: Trajectories that have no reward yet, in open groups and rests.
    playing: int = 0
    #: Those of them that are in rests.
    _playing_late: int = 0
    #: Where they are played.
    places: EpisodePlaces = field(default_factory=EpisodePlaces)
    models: ModelUses = field(default_factory=ModelUses)
    #: Generated tokens of each trajectory that has ended since ``take_lengths``.
    _lengths: list[Tokens] = field(default_factory=list)
    #: Generated tokens of surplus members, in turns that came back, since ``take_sampling``.
    _surplus_tokens: Tokens = 0
    #: Rests in the queue: the members to be played again, and how the others ended.
    _queued_rests: dict[GroupId, tuple[list[int], tuple[Outcome, ...]]] = field(
        default_factory=dict
    )
    _attempts: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    #: Failures of members of open groups; playing again because of age is none.
    _failures: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    #: How many groups each step took whose version is not published yet.
    _unpublished: dict[int, int] = field(default_factory=dict)
    #: Groups that were given up or filtered after the checkpoint that this run went on from.
    _dropped: Set[GroupId] = frozenset()
    #: What each of the last ``TRAINED_STEPS`` trained, of those whose checkpoint would hold it.
    _trained: dict[Version, list[Any]] = field(default_factory=dict)
    #: Whether a group has changed its state since the trainer last asked for a batch.
    _unclaimed_change: bool = True
    #: How many groups are in each state, and what is asked of that at every event: how many are on
    #: their way to the optimizer, and how many are READY.
    _counts: Counter[GroupState] = field(default_factory=Counter)
    _pending: int = 0
    _ready: int = 0

    def count(self, *states: GroupState) -> int:
        """Return how many groups are in one of these states."""
        return sum(self._counts[state] for state in states)

    def _enter(self, group: Group, state: GroupState) -> None:
        before, group.state = group.state, follow(TRANSITIONS, group.state, state, group)
        if not group.is_rest:
            self._add(before, -1)
            self._add(state, 1)
        self._unclaimed_change = True

    def _add(self, state: GroupState, change: int) -> None:
        self._counts[state] += change
        self._pending = self.count(GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
        self._ready = self._counts[GroupState.READY]

    @property
    def may_open(self) -> bool:
        """Whether the staleness bound admits one more group; a rest that plays counts by member.

        Groups of a step whose version is not out yet count: what opens now begins with another.
        """
        places = (self.rule.bound + 1) * self.groups_per_step
        pending = self._pending + sum(self._unpublished.values())
        return pending * self.group_size + self._playing_late < places * self.group_size

    @property
    def members_started(self) -> int:
        """Trajectories that a group begins with."""
        return self.group_size + self.oversample

    @property
    def batch_is_full(self) -> bool:
        """Whether enough groups for a step are READY, or in it already."""
        return self._ready >= self._open_places

    def open(self, *, version: Version, now: Seconds) -> Group:
        """Start the next group: one that has to be played again, or the next of the stream."""
        group_id = self.queue.popleft() if self.queue else self._new_group()
        everyone = list(range(self.members_started))
        numbers, finished = self._queued_rests.pop(group_id, (everyone, ()))
        members = [self._new_member(group_id, member, now) for member in numbers]
        task = self._task_of(group_id)
        group = Group(group_id, members, now, version, self.rule, task=task, finished=finished)
        if group.is_rest:
            self.rests[group_id] = group
            self._playing_late += len(members)
        else:
            self.groups[group_id] = group
            self._add(group.state, 1)
        self.playing += len(members)
        return group

    def _new_group(self) -> GroupId:
        """The next of the stream that was not given up before the run went on."""
        while True:
            group, self.next_group = self.next_group, self.next_group + 1
            if self.curriculum is not None:
                self.curriculum.deal(group)
            if group not in self._dropped:
                return group
            self._forget_task(group)

    def _task_of(self, group: GroupId) -> int | None:
        return None if self.curriculum is None else self.curriculum.task_of[group]

    def _forget_task(self, group: GroupId) -> None:
        if self.curriculum is not None:
            self.curriculum.forget(group)

    def _new_member(self, group: GroupId, member: int, now: Seconds) -> Trajectory:
        attempt = self._attempts.get((group, member), 0)
        self._attempts[group, member] = attempt + 1
        return self.make(TrajectoryId(group, member, attempt), now)

    def find(self, trajectory: TrajectoryId) -> Trajectory | None:
        """Return the trajectory, if it is still the one being
        played; None for an old or ended one.
        """
        group, place = self._find(trajectory)
        if group is None or group.state is not GroupState.OPEN:
            return None
        current = group.members[place]
        return current if current.id == trajectory and current.reward is None else None

    def _find(self, trajectory: TrajectoryId) -> tuple[Group | None, int]:
        """The group, or rest of one, that it is a member of, and where among the members."""
        for groups in (self.rests, self.groups):
            group = groups.get(trajectory.group)
            place = None if group is None else group.place(trajectory)
            if place is not None:
                return group, place
        return None, 0

    def _with(self, trajectory: TrajectoryId) -> tuple[Group, int]:
        group, place = self._find(trajectory)
        assert group is not None, f"{trajectory} is in no group"
        return group, place

    def finish(self, trajectory: TrajectoryId, reward: float) -> Group:
        """Give a member its reward; the group is READY, or FILTERED, when it was the last.

        Its surplus is the caller's to stop.
        """
        group, place = self._with(trajectory)
        member = group.members[place]
        member.reward = reward
        self.playing -= 1
        self._playing_late -= group.is_rest
        self._lengths.append(member.generated)
        if len(group.ended) + len(group.finished) >= self.group_size:
            left = self._leave(group)
            group.surplus = len(left)
            self._surplus_tokens += sum(member.generated for member in left)
        if group.reward is not None:
            self._ready_now(group)
        elif group.rule.least is not None:  # it may be one that can be closed now
            self._unclaimed_change = True
        return group

    def _leave(self, group: Group) -> list[Trajectory]:
        """Take the members without a reward out of their group, or rest."""
        left = [member for member in group.members if member.reward is None]
        group.members = [member for member in group.members if member.reward is not None]
        self.playing -= len(left)
        self._playing_late -= len(left) if group.is_rest else 0
        self._lengths += [member.generated for member in left]
        return left

    def _ready_now(self, group: Group) -> None:
        if self.curriculum is not None and not group.is_rest:
            self.curriculum.ended(group.id, group.ended)
        if self._lacks_signal(group):
            self._filter(group)
            return
        self._enter(group, GroupState.READY)
        group.oldest = _oldest(group, group.started_version)

    def _lacks_signal(self, group: Group) -> bool:
        """Whether dynamic sampling filters the group, by its members that have ended."""
        return self.filtered.filters(group.compared)

    def _filter(self, group: Group) -> None:
        tokens = sum(member.generated for member in group.members)
        if group.is_rest:
            self.filtered.tokens += tokens
        else:
            self.filtered.add(tokens, group.members[0].environment)
        self._enter(group, GroupState.FILTERED)
        self._forget(group)

    def take_lengths(self) -> list[Tokens]:
        """Return the generated tokens of each trajectory that has ended since the last call."""
        taken, self._lengths = self._lengths, []
        return taken

    def take_sampling(self, trained: Tokens) -> dict[str, float]:
        """Return the metrics of untrained trajectories since the last call, and of the curriculum's
        pool.

        ``trained`` is the number of tokens that were trained meanwhile. ``core.rollout.batches``
        lists the names.
        """
        surplus, self._surplus_tokens = self._surplus_tokens, 0
        over = {"surplus_tokens": surplus} if self.oversample else {}
        pool = {} if self.curriculum is None else self.curriculum.metrics()
        return {**over, **pool, **(self.filtered.take(trained) if self.filtered.most else {})}

    def begin_again(
        self, trajectory: TrajectoryId, *, now: Seconds, counts: bool = True
    ) -> Trajectory | None:
        """Play a broken trajectory again from its prompt; None when that drops the group.

        A failure is never scored: after ``retries`` attempts the whole group goes, so that no
        baseline is computed over the lucky members only.
        """
        group, place = self._with(trajectory)
        who = (group.id, trajectory.member)
        self._failures[who] = self._failures.get(who, 0) + counts
        if self._failures[who] > self.retries:
            self.give_up(group)
            return None
        group.members[place] = self._new_member(group.id, trajectory.member, now)
        self._unclaimed_change = True  # its oldest tokens are gone: nobody may wait for it now
        return group.members[place]

    def give_up(self, group: Group) -> None:
        """Drop a group: it is never trained, and its prompt is not played again."""
        self._enter(group, GroupState.DROPPED)
        unfinished = sum(member.reward is None for member in group.members)
        self.playing -= unfinished
        self._playing_late -= unfinished if group.is_rest else 0
        group.step = None
        self._forget(group)

    def group_of(self, trajectory: TrajectoryId) -> Group:
        """The group, or rest of one, that plays the trajectory."""
        return self._with(trajectory)[0]

    def expire(self, version: Version) -> list[Group]:
        """Send READY groups that are too old for the next step back to the queue."""
        if not self._unclaimed_change or not self._ready:
            return []
        stale = [
            group
            for group in self.groups.values()
            if group.state is GroupState.READY and group.is_too_old(version)
        ]
        for group in stale:
            self._enter(group, GroupState.STALE)
            self._drop(group)
            self.queue.append(group.id)
        return stale

    def close(self, step: int) -> list[Group]:
        """Close groups at their last call without their unfinished members, if the rule does that.

        Not before that completes the batch of this step, no more than it has places for, the
        oldest first, and besides those that are filtered. What is given up of them is the caller's
        to stop.
        """
        if not self._unclaimed_change or not (last_call := self._at_last_call(step)):
            return []
        places = self._open_places
        closable = [group for group in last_call if self._may_close(group)]
        takes_place = [group for group in closable if not self._lacks_signal(group)]
        if self._ready + len(takes_place) < places or len(closable) < len(last_call):
            return []
        takes_place.sort(key=lambda group: (_oldest(group, step), group.id))
        stay = {group.id for group in takes_place[places:]}
        closed = [group for group in closable if group.id not in stay]
        for group in closed:
            self._close(group)
        return closed

    def _close(self, group: Group) -> None:
        left = [member for member in group.members if member.reward is None]
        group.missing = self.group_size - len(group.ended)
        if group.rule.keeps_rest:
            group.members = [member for member in group.members if member.reward is not None]
            started, finished = group.started_version, group.compared.members
            self.rests[group.id] = Group(
                group.id,
                left,
                group.started_at,
                started,
                group.rule,
                task=group.task,
                finished=finished,
            )
            self._playing_late += len(left)
        else:
            self._leave(group)
        self._ready_now(group)

    def claim(self, step: int) -> list[Group]:
        """Return the batch of this step, oldest groups first; empty while there are too few.

        It is also empty while the rule waits for a group that this step is the last one for. Rests
        that are READY come on top.
        """
        changed, self._unclaimed_change = self._unclaimed_change, False
        if not changed or not self.batch_is_full:
            return []
        if self._waited_for(step):
            return []
        rests = [rest for rest in self.rests.values() if self._may_join(rest)]
        self.filtered.in_a_row = 0
        return self._claim(step, self._open_places, rests)

    def _may_join(self, rest: Group) -> bool:
        """A rest is never in one batch with its group, whose place and name it shares."""
        group = self.groups.get(rest.id)
        joined = group is None or group.state is GroupState.TRAINED
        return rest.state is GroupState.READY and joined

    def claim_part(self, step: int, *, least: int) -> list[Group]:
        """Groups of this step's batch that are READY before it is full: at least so many, or none.

        Places are left for groups still played that this step is the last one for.
        """
        if not self._ready or self.batch_is_full:
            return []
        free = self._open_places - len(self._at_last_call(step))
        return self._claim(step, free) if min(free, self._ready) >= least else []

    @property
    def _open_places(self) -> int:
        """Free places of the next step's batch, of which parts may be claimed already."""
        return self.groups_per_step - self._counts[GroupState.CLAIMED]

    def _claim(self, step: int, most: int, rests: Sequence[Group] = ()) -> list[Group]:
        ready = [group for group in self.groups.values() if group.state is GroupState.READY]
        batch = [*sorted(ready, key=lambda group: (group.oldest, group.id))[:most], *rests]
        for group in batch:
            self._enter(group, GroupState.CLAIMED)
            group.step = step
        return batch

    def _at_last_call(self, step: int) -> list[Group]:
        """Groups that are played and that the rule would have too old for any later step."""
        played = (group for group in self.groups.values() if group.state is GroupState.OPEN)
        return [group for group in played if group.is_at_last_call(step)]

    def _may_close(self, group: Group) -> bool:
        least = group.rule.least_of(self.group_size)
        return least is not None and len(group.ended) >= least

    def _waited_for(self, step: int) -> bool:
        """Whether a group is at its last call and cannot be closed."""
        return any(not self._may_close(group) for group in self._at_last_call(step))

    def trained(self, step: int) -> list[Group]:
        """Mark the step's groups as TRAINED, and keep them until a checkpoint holds them."""
        done = [group for group in self._all() if group.step == step]
        for group in done:
            self._enter(group, GroupState.TRAINED)
        self._unpublished[step] = sum(not group.is_rest for group in done)
        self._trained[step] = self.named(done)
        self._trained.pop(step - TRAINED_STEPS, None)
        return done

    def named(self, groups: Sequence[Group]) -> list[Any]:
        """Return the groups as a journal names them: the id, or ``[id,
        members]`` of one that is not whole.
        """
        names: list[Any] = []
        for group in sorted(groups, key=lambda group: (group.id, group.is_rest)):
            whole = not group.is_rest and not group.missing
            members = [member.id.member for member in group.members]
            names.append(group.id if whole else [group.id, members])
        return names

    def published(self, step: int) -> None:
        """Note that the version of a step is published, and with it those of the steps before."""
        for before in [number for number in self._unpublished if number <= step]:
            del self._unpublished[before]

    def _all(self) -> Iterator[Group]:
        """Yield every group, and every rest of one."""
        yield from self.groups.values()
        yield from self.rests.values()

    def settle(self, step: int) -> None:
        """Forget the groups up to ``step``, which a checkpoint holds."""
        for group in list(self._all()):
            if group.state is GroupState.TRAINED and (group.step or 0) <= step:
                self._forget(group)

    def _drop(self, group: Group) -> None:
        if group.is_rest:
            del self.rests[group.id]
            return
        del self.groups[group.id]
        self._add(group.state, -1)

    def _forget(self, group: Group) -> None:
        self._drop(group)
        if group.id in self.groups or group.id in self.rests:
            return
        for member in range(self.members_started):
            self._attempts.pop((group.id, member), None)
            self._failures.pop((group.id, member), None)
        self._forget_task(group.id)

    def rollback(self, step: int) -> None:
        """Make READY again what was trained or claimed after
        ``step``, where the trainer is back.
        """
        self._unpublished.clear()  # it has published that step's version
        self._trained = {done: names for done, names in self._trained.items() if done <= step}
        for group in self._all():
            if group.step is not None and group.step > step:
                self._enter(group, GroupState.READY)
                group.step = None

    def position(self, step: int) -> dict[str, Any]:
        """Return the state that a checkpoint after ``step`` needs to
        go on with exactly the prompts left.
        """
        groups, rests = (
            {group.id: group for group in found.values() if (group.step or step + 1) > step}
            for found in (self.groups, self.rests)
        )
        played = {
            rest.id: ([member.id.member for member in rest.members], rest.finished)
            for rest in rests.values()
            if rest.id not in groups
        }
        queue = sorted([*groups, *played, *self.queue])
        curriculum = {} if self.curriculum is None else self.curriculum.position(queue)
        return {
            "step": step,
            "next_group": self.next_group,
            "trained": sorted((self._trained | self._claimed(step)).items()),
            "queue": queue,
            "curriculum": curriculum,
            "rests": [
                {"group": group, "members": members, "finished": list(finished)}
                for group, (members, finished) in (played | self._queued_rests).items()
            ],
        }

    def _claimed(self, step: int) -> dict[Version, list[Any]]:
        """Return the groups of a step that is being taken, as ``{step:
        named}``; empty if there are none.
        """
        claimed = [group for group in self._all() if group.step == step]
        return {step: self.named(claimed)} if claimed else {}

    def restore(self, position: dict[str, Any], dropped: Set[GroupId] = frozenset()) -> None:
        """Continue from a checkpoint; groups and rests that were in flight are played again.

        Not so those ``dropped`` since.
        """
        self._dropped = dropped
        self.next_group = int(position["next_group"])
        self.queue = deque(int(group) for group in position["queue"] if group not in dropped)
        self._trained = {int(step): names for step, names in position.get("trained", ())}
        if self.curriculum is not None:
            self.curriculum.restore(position["curriculum"])
        self._queued_rests = {
            int(rest["group"]): (
                [int(member) for member in rest["members"]],
                tuple(map(_outcome, rest["finished"])),
            )
            for rest in position.get("rests", ())
        }

    def check(self) -> None:
        """Raise AssertionError if the counts of groups and
        trajectories differ from what is there.
        """
        assert not set(self.queue) & set(self.groups), "a group is both queued and alive"
        assert all(group < self.next_group for group in [*self.queue, *self.groups])
        unrewarded = [m for g in self._all() for m in g.members if m.reward is None]
        assert self.playing == len(unrewarded), f"{self.playing} playing, {len(unrewarded)} found"
        late = [m for rest in self.rests.values() for m in rest.members if m.reward is None]
        assert self._playing_late == len(late), f"{self._playing_late} late, {len(late)} found"
        found = Counter(group.state for group in self.groups.values())
        assert found == +self._counts, f"{found} found, {self._counts} counted"
        pending = self.count(GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
        assert pending == self._pending, f"{pending} on their way, {self._pending} counted"
        assert found[GroupState.READY] == self._ready, f"{self._ready} ready counted"
        for group in self._all():
            claimed = group.state in (GroupState.CLAIMED, GroupState.TRAINED)
            assert claimed == (group.step is not None), f"group {group.id}: {group.state}"
            is_played = any(member.reward is None for member in group.members)
            assert (group.state is GroupState.OPEN) == is_played, group.id
        for rest in self.rests.values():
            group_of = self.groups.get(rest.id)
            twice = rest.step is not None and group_of is not None and group_of.step == rest.step
            assert not twice, f"{rest} is trained together with it"
