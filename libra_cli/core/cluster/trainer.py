"""The trainer: one accelerate world on the train slots, one optimizer step at a time.

A trainer that dies is started again from the last checkpoint, as its budget allows (``restarts``)
and at most once a minute. It comes back as a new trainer *incarnation*; what the ledger had given
it since that checkpoint is given to it again, and the servers go back to its version. A trainer
that never started has a configuration error and is not tried again.

A batch that is in the trainer when it dies may be what kills it. Groups that have been in two such
messages are sent one at a time from then on; if the trainer dies of one of them alone, that group
is dropped, and the run goes on.

With ``stream`` a step begins on the groups that are READY while others are still played: their
gradients are sums, divided once at the end, so what comes out does not depend on it.

**Resize.** For a lasting shift the trainer group itself changes its slots: no step is begun, a
checkpoint is written, every rank stops, and new ones start from it at the same global batch.
Servers go on all the while. If the new ones do not come up, the old ones are started again where
they were; those slots are held free until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from json import dumps
from math import inf
from typing import Any, ClassVar, assert_never

from libra_cli.core.actions import (
    Accumulate,
    Checkpoint,
    Save,
    StartTrainer,
    StopTrainer,
    Train,
    TrainerAction,
    TrainSample,
    Wake,
    without_advantage,
)
from libra_cli.core.advantages.estimates import advantage_metrics, runs_of
from libra_cli.core.algorithms.algorithm import Algorithm
from libra_cli.core.algorithms.replay import ReplayBuffer, replay_metrics
from libra_cli.core.cluster.checkpoints import Checkpoints
from libra_cli.core.cluster.fatal_groups import FatalGroupDetector
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import GONE_S
from libra_cli.core.cluster.restarts import RestartBudget
from libra_cli.core.cluster.step_record import StepPeriod, mean_reward, step_record
from libra_cli.core.events import (
    Accumulated,
    CheckpointFailed,
    CheckpointSaved,
    NodeBack,
    NodeEvent,
    NodeGone,
    NodeLost,
    PublishedVersion,
    StepDone,
    TrainerEvent,
    TrainerFailed,
    TrainerStarted,
    TrainerStopped,
    VersionPublished,
)
from libra_cli.core.lifecycle import follow
from libra_cli.core.notices import (
    GroupClosed,
    ReplicaChanged,
    ResizeRefused,
    Result,
    StepClaimed,
    StepOver,
    StepTaken,
    VersionOut,
    VersionsLost,
)
from libra_cli.core.records import CreditRecord, NoteRecord, StepRecord, VersionRecord
from libra_cli.core.rollout.batches import batch_metrics
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.rollout.rows import credit_record, group_record, group_records
from libra_cli.core.types import (
    Branch,
    Role,
    Seconds,
    Slot,
    SlotId,
    Trajectory,
    TrajectoryId,
    WeightVersion,
)

RESTART_EVERY_S: Seconds = 60.0
TIMER = "restart trainer"
PATIENCE_S: Seconds = 1800.0
"""How long a step or a checkpoint may take that the end of a run waits for: the time-out of the
trainer's collectives, by which a rank that hangs ends the others (``torch.distributed``)."""
NEXT = "another is tried with the next step, so make room for it there"
DAMAGED = "is damaged"
"""What a trainer says of a checkpoint that it cannot start from (``node.trainer.checkpoint``)."""
PARTS = 4
"""A streamed part is at least this fraction of a batch: each costs a round trip to the trainer."""

_ROLES = {ReplicaState.FAILED: Role.FAILED, ReplicaState.IDLE: Role.IDLE}


class TrainerState(StrEnum):
    """What the trainer does now."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    STOPPING = "stopping"
    FAILED = "failed"


T = TrainerState

TRANSITIONS: dict[TrainerState, dict[TrainerState, str]] = {
    T.DOWN: {
        T.STARTING: "the run begins, it moves to other slots, or a minute has passed since it died",
        T.FAILED: "it died too often of late, never started, or waited too long for a node",
    },
    T.STARTING: {
        T.READY: "every rank is there and has published a version",
        T.STOPPING: "a rank died or was not ready in time, or the run ends",
    },
    T.READY: {
        T.BUSY: "a batch, or a part of one, is claimed",
        T.STOPPING: "a rank died, it moves to other slots, or the run ends",
    },
    T.BUSY: {
        T.READY: "the step is done, or the part accumulated",
        T.STOPPING: "a rank died, the step failed, or the run ends",
    },
    T.STOPPING: {
        T.DOWN: "no process of it is left on any node",
    },
    T.FAILED: {},
}


class TrainerGroup:
    """The trainer and its steps. Methods return the actions they call for."""

    events: ClassVar[Any] = TrainerEvent | NodeEvent
    actions: ClassVar[Any] = TrainerAction

    def __init__(
        self,
        ledger: GroupLedger,
        slots: Iterable[Slot],
        *,
        checkpoint_every: int,
        algorithm: Algorithm,
        stream: bool = False,
        mask_truncated: bool = False,
        replay: ReplayBuffer | None = None,
    ) -> None:
        self._ledger = ledger
        self._masks = mask_truncated
        self._replay = replay
        #: What the step under way, or the last one, trains again.
        self.replayed: list[Group] = []
        self._stream = stream
        self._algorithm = algorithm
        #: Of the trajectories of the batch that is trained, or was trained last.
        self._advantages: dict[TrajectoryId, tuple[float, ...]] = {}
        self.replicas = [Replica(slot, since=0.0, role=Role.TRAIN) for slot in slots]
        self.state = TrainerState.DOWN
        self.incarnation = self.step = 0
        self._ending = False
        self.published: PublishedVersion | None = None
        #: A version whose step is not known to be done: the news of the two may cross.
        self._early: PublishedVersion | None = None
        self.checkpoints = Checkpoints(checkpoint_every)
        self.detail = ""
        #: Nodes that are given up, and since when.
        self._gone: dict[str, Seconds] = {}
        self._ever_started = False
        #: It found its checkpoint damaged, and would again; a run that is resumed takes another.
        self._damaged = False
        self._restarts = 0
        self._budget = RestartBudget()
        self._fatal_groups = FatalGroupDetector()
        #: Groups of the last message; groups of the batch that are yet to be sent alone.
        self._sent: list[Group] = []
        self._apart: list[Group] = []
        self._started_at: Seconds = 0.0
        self._idle_since: Seconds = 0.0
        #: When the next batch became full, as far as the trainer was free to see it.
        self._full_since: Seconds = inf
        self._batch: list[Group] = []
        self._batch_at: Seconds = 0.0
        #: Whether the last batch had groups that dynamic sampling would have left out.
        self._without_signal = False
        #: Parts of the next step that are accumulated, or being so.
        self._parts = 0
        #: The part whose end is waited for; 0 for none.
        self._awaited = 0
        #: The slots that it is to move to; those it comes from, while it starts on the new ones.
        self._next: list[Slot] = []
        self.previous: list[Replica] = []
        self._rows: dict[int, StepRecord] = {}
        #: The longest that a step or a checkpoint took, and when the last checkpoint was asked for.
        self._slowest_s: Seconds = 0.0
        self._save_asked_at: Seconds = 0.0
        self._step_ended: Seconds = 0.0

    def handle(self, event: TrainerEvent | NodeEvent, *, now: Seconds) -> Iterable[Result]:
        """What comes of an event of the trainer, or of a node that a rank may be on."""
        match event:
            case NodeLost():
                return ()
            case NodeBack(node):
                return self.back(node, now=now)
            case NodeGone(node, reason):
                return self.node_gone(node, reason, now=now)
            case _:
                of_this = event.incarnation == self.incarnation
                return self._take_in(event, now) if of_this else ()

    def _take_in(self, event: TrainerEvent, now: Seconds) -> Iterable[Result]:
        match event:
            case TrainerStarted():
                return self.started(event, now=now)
            case TrainerFailed():
                return self.failed(event.reason, now=now)
            case TrainerStopped():
                return self.gone(now=now)
            case StepDone():
                return self._step_done(event, now)
            case VersionPublished():
                return self.version_published(event.published)
            case Accumulated():
                return self.accumulated(event)
            case CheckpointSaved() | CheckpointFailed():
                return self._checkpoint_ended(event, now)
            case _:
                assert_never(event)

    def _checkpoint_ended(
        self, event: CheckpointSaved | CheckpointFailed, now: Seconds
    ) -> list[Result]:
        if isinstance(event, CheckpointSaved):
            return self.saved(event, now=now)
        return self.save_failed(event, now=now)

    def _step_done(self, event: StepDone, now: Seconds) -> Iterator[Result]:
        if self.state is not TrainerState.BUSY or event.step <= self.step:
            return
        yield from self.done(event, now=now)
        for group in self._batch:
            yield from map(Save, group_records(group, now))
        if published := event.published or self._early:
            yield from self.version_published(published)
        yield StepTaken(self.last)

    def wants(self, action: TrainerAction) -> bool:
        """Whether the end of the action is still waited for."""
        if action.incarnation != self.incarnation:
            return False
        match action:
            case StartTrainer():
                return self.state is TrainerState.STARTING
            case StopTrainer():
                return self.state is TrainerState.STOPPING
            case Train() | Accumulate():
                return self.state is TrainerState.BUSY and action.step == self.step + 1
            case Checkpoint():
                return self.checkpoints.writing
            case _:
                assert_never(action)

    def wind_down(self) -> None:
        """A trainer that ends from now on is not started again."""
        self._ending = True

    def _enter(self, state: TrainerState) -> None:
        self.state = follow(TRANSITIONS, self.state, state, "the trainer")

    # -- coming and going -----------------------------------------------------------------------

    def start(self, *, now: Seconds) -> list[Result]:
        """Start every rank, from the last checkpoint if there is one."""
        self._enter(TrainerState.STARTING)
        self._started_at = now
        self.incarnation += 1
        return [
            StartTrainer(self.incarnation, self.slots, self.checkpoints.path),
            *self._move(ReplicaState.STARTING, now=now),
        ]

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """The slots of its ranks, in order."""
        return tuple([replica.slot.id for replica in self.replicas])

    @property
    def target_slots(self) -> tuple[SlotId, ...]:
        """The slots that it has, or is to have."""
        return tuple([slot.id for slot in self._next]) if self._next else self.slots

    @property
    def proved_slots(self) -> tuple[SlotId, ...]:
        """The slots on which it has worked: those it has, or those a resize has left."""
        return tuple(replica.slot.id for replica in self.previous) or self.slots

    @property
    def resizing(self) -> bool:
        """Whether it is on its way to other slots."""
        return bool(self._next or self.previous)

    @property
    def may_resize(self) -> bool:
        """Whether it may be asked to move to other slots now."""
        return self.state in (TrainerState.READY, TrainerState.BUSY) and not self.previous

    @property
    def reserved(self) -> list[Slot]:
        """Slots that a rank is on, or may be started on at any moment."""
        return [*self._next, *(replica.slot for replica in (*self.replicas, *self.previous))]

    @property
    def streaming(self) -> bool:
        """Whether a part of the next step is in already."""
        return self._parts > 0

    def resize(self, slots: list[Slot], *, now: Seconds) -> list[Result]:
        """Move to these slots, as soon as the step under way is done and saved; none: stay."""
        self._next = slots
        return self._leave(now)

    def _leave(self, now: Seconds) -> list[Result]:
        """Save what there is, then stop; the rest follows from that."""
        if not self._next or self.state is not TrainerState.READY or self.publishing:
            return []
        if self.step > max(self.checkpoints.step, 0) or self.checkpoints.writing:
            if not self.checkpoints.given_up(self.step):
                return self.save(now=now)
            self._next = []
            return [ResizeRefused(self.unsaved)]
        return self.stop("the trainer is resized", now=now)

    def started(self, event: TrainerStarted, *, now: Seconds) -> list[Result]:
        """Ready at some step; what the ledger gave it beyond that is given to it again."""
        if self.state is not TrainerState.STARTING:
            return []
        self._enter(TrainerState.READY)
        self._ever_started = True
        self._budget.works(now=now)
        self.previous = []
        self._idle_since = self._step_ended = now
        self._full_since = inf
        self.step = event.published.version.step
        self.checkpoints.forget_asked()
        self.checkpoints.begins(self.incarnation, self.step)
        self._ledger.rollback(self.step)
        self._batch, self._parts, self._awaited, self._apart = [], 0, 0, []
        return [
            *self._replay_begins(now),
            *self._move(ReplicaState.TRAINING, now=now),
            *self.version_published(event.published),
        ]

    def _replay_begins(self, now: Seconds) -> list[Result]:
        """What the trainer has trained since its checkpoint is not replayed before it is trained
        again; a buffer that is lost is told."""
        if self._replay is None:
            return []
        self._replay.rollback(self.step)
        if self.step == 0 or len(self._replay):
            return []
        told = f"goes on from step {self.step} with none of the groups that it held; it fills again"
        return [Save(NoteRecord("batch", "the replay buffer", now, told, resolved_at=now))]

    @property
    def published_step(self) -> int:
        """The newest step whose version can be fetched."""
        return self.published.version.step if self.published else self.step

    @property
    def publishing(self) -> bool:
        """Whether the version of a step that is done is still being written."""
        up = self.state in (TrainerState.READY, TrainerState.BUSY)
        return up and self.published is not None and self.published.version != self.held

    @property
    def held(self) -> WeightVersion:
        """The version that the trainer computes with."""
        return WeightVersion(self.incarnation, self.step)

    def version_published(self, published: PublishedVersion) -> list[Result]:
        """A version can be fetched: its row; none if it is known, or its step is not yet."""
        self._early = published if published.version.step > self.step else None
        known = self.published is not None and published.version <= self.published.version
        if known or self._early:
            return []
        self.published = published
        self._ledger.published(published.version.step)
        row = VersionRecord(
            version=published.version.step,
            trainer_incarnation=published.version.trainer_incarnation,
            published_at=published.at,
            bytes=published.bytes,
        )
        return [Save(row), VersionOut(published)]

    def failed(self, reason: str, *, now: Seconds) -> list[Result]:
        """A rank died or a step failed: stop whatever is left of it."""
        if self.state in (TrainerState.DOWN, TrainerState.STOPPING, TrainerState.FAILED):
            return []
        self._damaged = self.state is TrainerState.STARTING and DAMAGED in reason
        if self.state is not TrainerState.BUSY:
            return self.stop(reason, now=now)
        if self._replay is not None:
            self._replay.discard(self.replayed)
        guilty = self._fatal_groups.died_with(self._sent)
        return [*self._drop(guilty, reason, now), *self.stop(reason, now=now)]

    def _drop(self, guilty: list[Group], reason: str, now: Seconds) -> list[Result]:
        """These groups end the trainer: they are not tried again."""
        results: list[Result] = []
        for group in guilty:
            self._ledger.give_up(group)
            why = f"the trainer died of it alone, after it had died with it twice: {reason}"
            told = f"{why}; it is dropped: neither trained nor played again"
            rows = [] if group.is_rest else [Save(group_record(group, now, detail=why))]
            results += [*rows, Save(NoteRecord("batch", str(group), now, told))]
        return results

    def stop(self, why: str, *, now: Seconds) -> list[Result]:
        """Stop every rank."""
        if self.state in (TrainerState.DOWN, TrainerState.STOPPING, TrainerState.FAILED):
            return []
        if self.state is TrainerState.READY and not self._parts:
            self._budget.worked(now=now)  # a step that is not done is of no use
        self._enter(TrainerState.STOPPING)
        self.detail = why
        actions = [
            StopTrainer(self.incarnation, self.slots),
            *self._move(ReplicaState.STOPPING, now=now, why=why),
        ]
        return [*actions, StepOver()]

    def gone(self, *, now: Seconds) -> list[Result]:
        """Verified gone. Start it again if the run goes on and it may."""
        if self.state is not TrainerState.STOPPING:
            return []
        self._enter(TrainerState.DOWN)
        actions = self._move(ReplicaState.IDLE, now=now, why=self.detail)
        if self._ending:
            return actions
        if any(slot.node in self._gone for slot in self._next):
            self._next = []
            actions.append(ResizeRefused(self.detail))
        if self._next:
            return [*actions, *self._start_on(self._next, self.replicas, now)]
        if self.previous:
            old = [replica.slot for replica in self.previous]
            why = f"the resized trainer did not start: {self.detail}"
            return [*actions, *self._start_on(old, [], now), ResizeRefused(why)]
        wait_s = self._budget.wait_s()
        if not self._ever_started or self._damaged or wait_s is None:
            return [*actions, *self._give_up(now)]
        self._restarts += 1
        return [*actions, self._wake(wait_s, now)]

    def _wake(self, wait_s: Seconds, now: Seconds) -> Wake:
        return Wake(TIMER, max(wait_s, self._started_at + RESTART_EVERY_S - now))

    def _give_up(self, now: Seconds) -> list[Result]:
        self._enter(TrainerState.FAILED)
        return self._move(ReplicaState.FAILED, now=now, why=self.detail)

    def _start_on(self, slots: list[Slot], previous: list[Replica], now: Seconds) -> list[Result]:
        """Start on other slots; ``previous`` are held free until it works there."""
        self.previous, self._next = previous, []
        self.replicas = [Replica(slot, since=now, role=Role.TRAIN) for slot in slots]
        return [] if self.waits_for else self.start(now=now)

    def restart(self, *, now: Seconds) -> list[Result]:
        """The minute is over; a rank whose node is given up waits for that."""
        may = self.state is TrainerState.DOWN and not self.waits_for
        return self.start(now=now) if may else []

    @property
    def waits_for(self) -> list[str]:
        """Nodes of its ranks that are given up, in rank order."""
        nodes = dict.fromkeys(replica.slot.node for replica in self.replicas)
        return [node for node in nodes if node in self._gone]

    def node_gone(self, node: str, why: str, *, now: Seconds) -> list[Result]:
        """A node is given up: a rank that ran there is dead, and with it the trainer."""
        self._gone[node] = now
        lost = [VersionsLost()] if node == self.replicas[0].slot.node else []
        return [*lost, *(self.failed(why, now=now) if node in self.waits_for else [])]

    def back(self, node: str, *, now: Seconds) -> list[Result]:
        """A node answers again: a trainer that only waited for it is started."""
        waited = node in self.waits_for
        self._gone.pop(node, None)
        if not waited:
            return []
        self._budget.refill()
        return [self._wake(0.0, now)]

    def node_overdue(self, node: str, *, now: Seconds) -> list[Result]:
        """A node that was given up has had the time to come back."""
        overdue = node in self.waits_for and now - self._gone[node] >= GONE_S
        if not overdue or self.state is not TrainerState.DOWN:
            return []
        self.detail = f"{node} has not come back ({self.detail})"
        return self._give_up(now)

    def _move(self, to: ReplicaState, *, now: Seconds, why: str = "") -> list[Result]:
        for replica in self.replicas:
            replica.move(to, now=now, why=why)
            replica.incarnation = self.incarnation
            replica.restarts = self._restarts
            replica.role = _ROLES.get(to, Role.TRAIN)
        return [ReplicaChanged(replica) for replica in self.replicas]

    # -- steps ----------------------------------------------------------------------------------

    def claim(self, *, now: Seconds, target: int) -> list[Result]:
        """Train on the next batch, or a part of it, if the trainer is free and it is there."""
        if self._next:
            return self._leave(now)
        if self.state is not TrainerState.READY or self.step >= target:
            return []
        step = self.step + 1
        if self._apart:
            return self._send_alone(step, now, target)
        if self._ledger.batch_is_full:
            self._full_since = min(self._full_since, now)
        closed = [GroupClosed(group) for group in self._ledger.close(step)]
        last = self._claimed(self._ledger.claim(step))
        if last and self._fatal_groups.include(last):
            self._apart = last
            return [*closed, *self._send_alone(step, now, target)]
        if last:
            save = self.checkpoints.is_due(step, target)
            told = self._tell_signal(step, last, now)
            return [*closed, *told, *self._train(step, last, now, save=save)]
        return self._stream_part(step, now) if self._stream and not self._fatal_groups else []

    def _tell_signal(self, step: int, last: list[Group], now: Seconds) -> list[Result]:
        """Whether dynamic sampling had to let groups without signal into the batch."""
        most = self._ledger.filtered.most
        groups = [*self._batch, *last] if self._parts else last
        finds = self._ledger.filtered.finds_signal
        without = [one for one in groups if not (one.is_rest or finds(one.compared))]
        if not most or (not without and not self._without_signal):
            return []
        self._without_signal = bool(without)
        if not without:
            text = f"all groups of step {step} have signal again"
            return [Save(NoteRecord("sampling", "", now, text, resolved_at=now))]
        text = (
            f"step {step} trains on {len(without)} groups in which all rewards are the same, "
            f"{mean_reward(without):.2g} on average: {most} such groups had been left out since "
            "the step before. Give the policy tasks of which it solves some: libra help data"
        )
        return [Save(NoteRecord("sampling", "", now, text))]

    def _send_alone(self, step: int, now: Seconds, target: int) -> list[Result]:
        """The next group of a batch in which the trainer has died, by itself."""
        group = self._apart.pop(0)
        if self._apart:
            return self._accumulate(step, [group], now)
        return self._train(step, [group], now, save=self.checkpoints.is_due(step, target))

    def _claimed(self, groups: list[Group]) -> list[Group]:
        """Estimate the advantages of a batch, or of a part of one that the others do not change.

        Before it is cut up: groups that are sent alone are compared with the whole batch.
        """
        if groups:
            before = self._advantages if self._parts else {}
            self._advantages = {**before, **self._algorithm.advantages(groups)}
        return groups

    def _stream_part(self, step: int, now: Seconds) -> list[Result]:
        least = -(-self._ledger.groups_per_step // PARTS)
        groups = self._claimed(self._ledger.claim_part(step, least=least))
        return self._accumulate(step, groups, now) if groups else []

    def _accumulate(self, step: int, groups: list[Group], now: Seconds) -> list[Result]:
        self._begin(groups, now)
        self._parts += 1
        self._awaited = self._parts
        return [Accumulate(self.incarnation, step, self._parts, self._given(groups))]

    def accumulated(self, event: Accumulated) -> list[Result]:
        """A part is in: go on with the next, or with the step."""
        here = event.step == self.step + 1 and event.part == self._awaited
        if self.state is TrainerState.BUSY and here:
            self._enter(TrainerState.READY)
            self._awaited = 0
        return []

    def _begin(self, groups: list[Group], now: Seconds) -> None:
        self._batch = [*self._batch, *groups] if self._parts else groups
        self._sent = groups
        if not self._parts:
            self._batch_at = now
            self._budget.worked(now=now)
        self._enter(TrainerState.BUSY)

    def _given(self, groups: list[Group]) -> tuple[TrainSample, ...]:
        """What the trainer is given of them: all, or where truncated ones are masked the others.

        A message in which all are truncated has them without an advantage.
        """
        samples = self._samples(groups)
        if not self._masks:
            return samples
        whole = tuple(sample for sample in samples if not sample.trajectory.truncated)
        return whole or tuple(map(without_advantage, samples))

    def _samples(self, groups: list[Group]) -> tuple[TrainSample, ...]:
        return tuple(sample for group in groups for sample in self._samples_of(group))

    def _samples_of(self, group: Group) -> Iterator[TrainSample]:
        """Of each member its own tokens, and each other branch that there is to learn from."""
        for trajectory in group.members:
            yield self._sample(trajectory, trajectory, None)
            for number, branch in trajectory.others.items():
                if branch.spans:
                    yield self._sample(trajectory, branch, number)

    def _sample(self, trajectory: Trajectory, branch: Branch, number: int | None) -> TrainSample:
        runs = runs_of(trajectory, self._advantages[trajectory.id], number)
        by_token = self._algorithm.objective.by_token(branch, runs)
        fresh = branch.single_version == self.held
        turns = self._algorithm.advantage.turns_of(trajectory, number)
        return TrainSample(trajectory, self.step, fresh, runs, number, by_token, turns)

    def _train(self, step: int, last: list[Group], now: Seconds, *, save: bool) -> list[Result]:
        self._begin(last, now)
        self.checkpoints.learn_reward(step, mean_reward(self._batch))
        self.replayed = self._drawn(step)
        self._advantages = {**self._algorithm.advantages(self.replayed), **self._advantages}
        ledger = self._position(step) if save else None
        if save:
            self._save_asked(step, now)
        train = Train(
            self.incarnation,
            step,
            self._given([*last, *self.replayed]),
            ledger,
            held=self.held,
            parts=self._parts,
        )
        return [StepClaimed(train)]

    def _drawn(self, step: int) -> list[Group]:
        """What the step trains again; nothing while the trainer is watched dying of a group."""
        if self._replay is None or self._fatal_groups:
            return []
        return self._replay.draw(step, self.step, self._batch)

    def _save_asked(self, step: int, now: Seconds) -> None:
        self.checkpoints.asked(step)
        self._save_asked_at = now

    def _position(self, step: int) -> dict[str, Any]:
        """What a checkpoint of ``step`` is given: the ledger's position, and its score."""
        return {**self._ledger.position(step), **self.checkpoints.told(step)}

    def done(self, event: StepDone, *, now: Seconds) -> list[Result]:
        """A step is done: its row, and what the checkpoint makes forgettable."""
        self._enter(TrainerState.READY)
        self._learn_advantages(event)
        row = self._rows[event.step] = self._step_record(event, now)
        self._rows.pop(event.step - 8, None)
        self.step, self._parts = event.step, 0
        self._idle_since = self._step_ended = now
        self._full_since = inf
        self._budget.worked(now=now)
        self._slowest_s = max(self._slowest_s, now - self._batch_at)
        self._ledger.trained(event.step)
        if self._replay is not None:
            self._replay.add(self._batch, event.step)
        self._fatal_groups.cleared(self._batch)
        tokens, seconds = event.metrics.get("own_tokens"), event.metrics.get("own_s")
        over = StepOver(event.shares, tokens or 0.0, seconds or 0.0)
        return [Save(row), *map(Save, self._credits(event)), over]

    def _learn_advantages(self, event: StepDone) -> None:
        """Those that a critic in the trainer has estimated, of what was sent to it."""
        said = {(one.group, one.member): one.values for one in event.advantages}
        for group in self._batch:
            for member in group.members:
                values = said.get((member.id.group, member.id.member), ())
                if len(values) == len(member.turn_rewards) > 0:
                    self._advantages[member.id] = values

    def _credits(self, event: StepDone) -> Iterator[CreditRecord]:
        """What each trajectory of the batch was weighed by, and what the trainer said of it.

        Not of what was trained again: its rows are of the step that trained it first.
        """
        log_ratios = event.log_ratios.by_branch() if event.log_ratios else {}
        for group in self._batch:
            for member in group.members:
                branches: dict[int, Branch] = {**member.others, member.number: member}
                runs = {number: self._told(member, number, one) for number, one in branches.items()}
                yield credit_record(member, event.step, runs, log_ratios)

    def _told(self, member: Trajectory, number: int, branch: Branch) -> Sequence[tuple[int, float]]:
        runs = runs_of(member, self._advantages[member.id], number)
        return self._algorithm.objective.told(branch, runs)

    def remember(self, path: str, step: int) -> None:
        """A checkpoint of ``step`` exists: this is where a restart begins."""
        self.checkpoints.remember(path, step)
        self._ledger.settle(step)

    @property
    def last(self) -> StepRecord:
        """The row of the last step that is done."""
        return self._rows[self.step]

    @property
    def trained(self) -> list[Group]:
        """The groups of the last batch."""
        return self._batch

    @property
    def patience_s(self) -> Seconds:
        """How long what it does now is to be waited for: twice the slowest so far, or more."""
        return max(PATIENCE_S, 2 * self._slowest_s)

    @property
    def work(self) -> str:
        """What is waited for while it is ``at_work``."""
        if self.state is TrainerState.BUSY:
            return f"step {self.step + 1}"
        if self.publishing:
            return f"the version of step {self.step}"
        return f"the checkpoint of step {self.checkpoints.newest}"

    def save(self, *, now: Seconds) -> list[Result]:
        """Write a checkpoint now, if the trainer can and the last one is older."""
        known = self.step <= self.checkpoints.newest or self.checkpoints.given_up(self.step)
        if self.state is not TrainerState.READY or known:
            return []
        self._save_asked(self.step, now)
        return [Checkpoint(self.incarnation, self.step, self._position(self.step))]

    @property
    def at_work(self) -> bool:
        """Whether a step is being taken, or a version or a checkpoint of one is not written yet."""
        busy = self.state is TrainerState.BUSY
        writing = self.checkpoints.writing or self.publishing
        return busy or (self.state is TrainerState.READY and writing)

    def saved(self, event: CheckpointSaved, *, now: Seconds) -> list[Result]:
        """A checkpoint is written. The news of two may come in the wrong order."""
        if event.step > self.step:
            return []
        results: list[Result] = []
        if event.step > self.checkpoints.step:
            if self.checkpoints.failures:
                failed = self.checkpoints.failed_step
                text = f"that of step {failed} failed; that of step {event.step} is written"
                results.append(Save(NoteRecord("checkpoint", "", now, text, resolved_at=now)))
            self.remember(event.path, event.step)
            self._slowest_s = max(self._slowest_s, now - self._save_asked_at)
        row = self._rows.get(event.step)
        return [*results, Save(replace(row, checkpoint=event.path))] if row else results

    def save_failed(self, event: CheckpointFailed, *, now: Seconds) -> list[Result]:
        """A checkpoint could not be written; the next step asks for another."""
        if not self.checkpoints.failed(event.step, event.reason):
            return []
        return [Save(NoteRecord("checkpoint", "", now, f"{self.unsaved}; {NEXT}"))]

    @property
    def unsaved(self) -> str:
        """What could not be saved, and what that means."""
        checkpoints = self.checkpoints
        newest = f"is that of step {checkpoints.step}" if checkpoints.path else "does not exist"
        return (
            f"the checkpoint of step {checkpoints.failed_step} could not be written: "
            f"{checkpoints.failure}; the newest {newest}"
        )

    def _step_record(self, event: StepDone, now: Seconds) -> StepRecord:
        times = StepPeriod(
            began=self._batch_at,
            ended=now,
            since_last=now - self._step_ended,
            waited_s=self._batch_at - self._idle_since,
            held_s=max(0.0, self._batch_at - self._full_since),
        )
        played = self._ledger.take_lengths()
        trained = sum(member.generated for group in self._batch for member in group.members)
        metrics = {
            **batch_metrics(self._batch, self.step, self._ledger.rule.bound, played),
            **advantage_metrics(self._batch, self._advantages),
            **self._ledger.take_sampling(trained),
        }
        if self._replay is not None:
            metrics |= replay_metrics(self.replayed, self.step)
        samples = self._samples(self._batch)
        metrics |= self._algorithm.objective.metrics_of(samples)
        groups = self._ledger.named(self._batch)
        row = step_record(event, samples, times, metrics, groups)
        return replace(row, replayed_json=dumps([group.id for group in self.replayed]))

    def check(self) -> None:
        """Invariants that hold between any two events."""
        busy = self.state is TrainerState.BUSY
        assert not busy or self.published is not None, "busy before the first version"
        assert self.step >= self.checkpoints.step, f"step {self.step} < {self.checkpoints.step}"
