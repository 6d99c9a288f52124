"""The trainer: one accelerate world on the train slots, one optimizer step at a time.

A trainer that dies is started again from the last checkpoint: at most once a minute, three times a
run. It comes back as a new trainer *incarnation*; what the ledger had given it since that
checkpoint is given to it again, and the servers go back to its version. A trainer that never
started has a configuration error and is not tried again.

With ``stream`` a step begins on the groups that are READY while others are still played: their
gradients are sums, divided once at the end, so what comes out does not depend on it.

**Resize.** For a lasting shift the core itself changes its slots: no step is begun, a checkpoint is
written, every rank stops, and the new ones start from it at the same global batch. Servers go on
all the while. If the new core does not come up, the old one is started again where it was; its
slots are held free until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from statistics import fmean

from libra_cli.core.actions import (
    Accumulate,
    Action,
    Checkpoint,
    Save,
    StartTrainer,
    StopTrainer,
    Train,
    TrainSample,
    Wake,
)
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.replica import Replica, ReplicaState, slot_record
from libra_cli.core.events import (
    Accumulated,
    CheckpointSaved,
    PublishedVersion,
    StepDone,
    TrainerStarted,
)
from libra_cli.core.records import StepRecord, VersionRecord, to_metrics_json
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.types import Role, Seconds, Slot, SlotId, Trajectory

MAX_RESTARTS = 3
RESTART_EVERY_S: Seconds = 60.0
TIMER = "restart trainer"
PARTS = 4
"""A streamed part is at least this fraction of a batch: each costs a round trip to the trainer."""

_WITH_A_PLACE = frozenset(
    {"logprob_gap", "logprob_gap_tokens", "generated_tokens", "trainer_s", "own_tokens", "own_s"}
)
"""What the trainer says of a step that is a column, or that is for the workers' speeds only."""
_ROLES = {ReplicaState.FAILED: Role.FAILED, ReplicaState.IDLE: Role.IDLE}


class TrainerState(StrEnum):
    """What the trainer does now."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    STOPPING = "stopping"
    FAILED = "failed"


class TrainerGroup:
    """The trainer and its steps. Methods return the actions they call for."""

    def __init__(
        self,
        ledger: GroupLedger,
        workers: GradientWorkers,
        slots: Iterable[Slot],
        *,
        checkpoint_every: int,
        stream: bool = False,
    ) -> None:
        self._ledger = ledger
        self._workers = workers
        self._every = checkpoint_every
        self._stream = stream
        self.slots = [Replica(slot, since=0.0, role=Role.TRAIN) for slot in slots]
        self.state = TrainerState.DOWN
        self.incarnation = 0
        self.step = 0
        self.published: PublishedVersion | None = None
        self.checkpoint = ""
        self.checkpoint_step = -1
        self._asked_step = -1
        self.detail = ""
        self._ever_started = False
        self._restarts = 0
        self._started_at: Seconds = 0.0
        self._idle_since: Seconds = 0.0
        self._batch: list[Group] = []
        self._batch_at: Seconds = 0.0
        #: Parts of the next step that are accumulated, or being so.
        self._parts = 0
        #: The part whose end is waited for; 0 for none.
        self._awaited = 0
        #: The slots that the core is to move to; those it comes from, while the new one starts.
        self._next: list[Slot] = []
        self.held: list[Replica] = []
        #: Whether the core is back where it was, because the one asked for did not start.
        self.refused = False
        #: Whether a slot's row has been told since the pool last looked.
        self.stirred = False
        self._rows: dict[int, StepRecord] = {}
        self._step_ended: Seconds = 0.0

    # -- coming and going -----------------------------------------------------------------------

    def start(self, *, now: Seconds) -> list[Action]:
        """Start every rank, from the last checkpoint if there is one."""
        self.state, self._started_at = TrainerState.STARTING, now
        self.incarnation += 1
        return [
            StartTrainer(self.incarnation, self.core, self.checkpoint),
            *self._move(ReplicaState.STARTING, now=now),
        ]

    @property
    def core(self) -> tuple[SlotId, ...]:
        """The slots of its ranks, in order."""
        return tuple(status.slot.id for status in self.slots)

    @property
    def aim(self) -> tuple[SlotId, ...]:
        """The core that it has, or is to have."""
        return tuple(slot.id for slot in self._next) or self.core

    @property
    def home(self) -> tuple[SlotId, ...]:
        """The core that has worked: the one there is, or the one a resize has left."""
        return tuple(status.slot.id for status in self.held) or self.core

    @property
    def resizing(self) -> bool:
        """Whether the core is on its way to other slots."""
        return bool(self._next or self.held)

    @property
    def may_resize(self) -> bool:
        """Whether another core may be asked for now."""
        return self.state in (TrainerState.READY, TrainerState.BUSY) and not self.held

    @property
    def reserved(self) -> list[Slot]:
        """Slots that a rank is on, or may be started on at any moment."""
        return [*self._next, *(status.slot for status in (*self.slots, *self.held))]

    @property
    def streaming(self) -> bool:
        """Whether a part of the next step is in already."""
        return self._parts > 0

    def resize(self, slots: list[Slot], *, now: Seconds) -> list[Action]:
        """Move to these slots, as soon as the step under way is done and saved; none: stay."""
        self._next = slots
        return self._leave(now)

    def _leave(self, now: Seconds) -> list[Action]:
        """Save what there is, then stop; the rest follows from that."""
        if not self._next or self.state is not TrainerState.READY:
            return []
        if self.step > max(self.checkpoint_step, 0) or self._asked_step > self.checkpoint_step:
            return self.save()
        return self.stop("the core is resized", now=now)

    def started(self, event: TrainerStarted, *, now: Seconds) -> list[Action]:
        """Ready at some step; what the ledger gave it beyond that is given to it again."""
        self.state, self._ever_started = TrainerState.READY, True
        self.held = []
        self._idle_since = self._step_ended = now
        self.step = event.published.version.step
        self._asked_step = self.checkpoint_step
        self._ledger.rollback(self.step)
        self._batch, self._parts, self._awaited = [], 0, 0
        return [*self._publish(event.published), *self._move(ReplicaState.TRAINING, now=now)]

    def _publish(self, published: PublishedVersion) -> list[Action]:
        self.published = published
        row = VersionRecord(
            version=published.version.step,
            trainer_incarnation=published.version.trainer_incarnation,
            published_at=published.at,
            bytes=published.bytes,
        )
        return [Save(row)]

    def failed(self, reason: str, *, now: Seconds) -> list[Action]:
        """A rank died or a step failed: stop whatever is left of it."""
        if self.state in (TrainerState.DOWN, TrainerState.STOPPING, TrainerState.FAILED):
            return []
        return self.stop(reason, now=now)

    def stop(self, why: str, *, now: Seconds) -> list[Action]:
        """Stop every rank."""
        if self.state in (TrainerState.DOWN, TrainerState.STOPPING, TrainerState.FAILED):
            return []
        self.state, self.detail = TrainerState.STOPPING, why
        actions = [
            StopTrainer(self.incarnation, self.core),
            *self._move(ReplicaState.STOPPING, now=now, why=why),
        ]
        return [*actions, *self._workers.step_over((), (0.0, 0.0), now=now)]

    def gone(self, *, now: Seconds, again: bool) -> list[Action]:
        """Verified gone. Start it again if the run goes on and it may."""
        self.state = TrainerState.DOWN
        actions = self._move(ReplicaState.IDLE, now=now, why=self.detail)
        if not again:
            return actions
        if self._next or self.held:
            self._change_slots(now)
            return [*actions, *self.start(now=now)]
        if not self._ever_started or self._restarts >= MAX_RESTARTS:
            self.state = TrainerState.FAILED
            return [*actions, *self._move(ReplicaState.FAILED, now=now, why=self.detail)]
        self._restarts += 1
        return [*actions, Wake(TIMER, max(0.0, self._started_at + RESTART_EVERY_S - now))]

    def _change_slots(self, now: Seconds) -> None:
        """To those asked for; if the new core has just failed to start, back to the old one's."""
        self.refused = not self._next
        slots = self._next or [status.slot for status in self.held]
        self.held, self._next = (self.slots if self._next else []), []
        self.slots = [Replica(slot, since=now, role=Role.TRAIN) for slot in slots]

    def restart(self, *, now: Seconds) -> list[Action]:
        """The minute is over."""
        return self.start(now=now) if self.state is TrainerState.DOWN else []

    def _move(self, to: ReplicaState, *, now: Seconds, why: str = "") -> list[Action]:
        self.stirred = True
        for status in self.slots:
            status.move(to, now=now, why=why)
            status.incarnation = self.incarnation
            status.restarts = self._restarts
            status.role = _ROLES.get(to, Role.TRAIN)
        return [Save(slot_record(status, now=now)) for status in self.slots]

    # -- steps ----------------------------------------------------------------------------------

    def claim(self, *, now: Seconds, target: int) -> list[Action]:
        """Train on the next batch, or a part of it, if the trainer is free and it is there."""
        if self._next:
            return self._leave(now)
        if self.state is not TrainerState.READY or self.step >= target:
            return []
        step = self.step + 1
        rest = self._ledger.claim(step)
        if rest:
            return self._train(step, rest, now, save=step % self._every == 0 or step >= target)
        return self._accumulate(step, now) if self._stream else []

    def _accumulate(self, step: int, now: Seconds) -> list[Action]:
        least = -(-self._ledger.groups_per_step // PARTS)
        groups = self._ledger.claim_part(step, least=least)
        if not groups:
            return []
        self._begin(groups, now)
        self._parts += 1
        self._awaited = self._parts
        return [Accumulate(self.incarnation, step, self._parts, self._samples(groups))]

    def accumulated(self, event: Accumulated) -> list[Action]:
        """A part is in: go on with the next, or with the step."""
        if self.state is TrainerState.BUSY and event.part == self._awaited:
            self.state, self._awaited = TrainerState.READY, 0
        return []

    def _begin(self, groups: list[Group], now: Seconds) -> None:
        self._batch = [*self._batch, *groups] if self._parts else groups
        if not self._parts:
            self._batch_at = now
        self.state = TrainerState.BUSY

    def _samples(self, groups: list[Group]) -> tuple[TrainSample, ...]:
        return tuple(self._sample(member) for group in groups for member in group.members)

    def _train(self, step: int, rest: list[Group], now: Seconds, *, save: bool) -> list[Action]:
        assert self.published is not None
        self._begin(rest, now)
        shares = self._workers.shares(rest)
        ledger = self._ledger.position(step) if save else None
        if save:
            self._asked_step = step
        train = Train(
            self.incarnation,
            step,
            self._samples(rest),
            ledger,
            held=self.published,
            parts=self._parts,
            shares=shares,
        )
        return [train]

    def _sample(self, trajectory: Trajectory) -> TrainSample:
        assert self.published is not None
        fresh = trajectory.single_version == self.published.version
        return TrainSample(trajectory, self._staleness(trajectory), fresh)

    def _staleness(self, trajectory: Trajectory) -> int:
        oldest = self.step if trajectory.min_version is None else trajectory.min_version
        # After a rollback the oldest token may come from a version yet to be trained again.
        return max(0, self.step - oldest)

    def done(self, event: StepDone, *, now: Seconds) -> list[Action]:
        """A step is done and published: its row, and what the checkpoint makes forgettable."""
        row = self._rows[event.step] = self._step_record(event, now)
        self._rows.pop(event.step - 8, None)
        self.state, self.step, self._parts = TrainerState.READY, event.step, 0
        self._idle_since = self._step_ended = now
        self._ledger.trained(event.step)
        own = (event.metrics.get("own_tokens") or 0.0, event.metrics.get("own_s") or 0.0)
        actions = self._workers.step_over(event.shares, own, now=now)
        return [*self._publish(event.published), Save(row), *actions]

    def remember(self, path: str, step: int) -> None:
        """A checkpoint of ``step`` exists: this is where a restart begins."""
        self.checkpoint, self.checkpoint_step = path, step
        self._ledger.settle(step)

    @property
    def last(self) -> StepRecord:
        """The row of the last step that is done."""
        return self._rows[self.step]

    @property
    def trained(self) -> list[Group]:
        """The groups of the last batch."""
        return self._batch

    def save(self) -> list[Action]:
        """Write a checkpoint now, if the trainer can and the last one is older."""
        newest = max(self.checkpoint_step, self._asked_step, 0)
        if self.state is not TrainerState.READY or self.step <= newest:
            return []
        self._asked_step = self.step
        return [Checkpoint(self.incarnation, self.step, self._ledger.position(self.step))]

    @property
    def at_work(self) -> bool:
        """Whether a step is being taken or a checkpoint that was asked for is not written yet."""
        saving = self._asked_step > self.checkpoint_step
        busy = self.state is TrainerState.BUSY
        return busy or (self.state is TrainerState.READY and saving)

    def saved(self, event: CheckpointSaved) -> list[Action]:
        """A checkpoint is written. The news of two may come in the wrong order."""
        if event.step > self.checkpoint_step:
            self.remember(event.path, event.step)
        row = self._rows.get(event.step)
        return [Save(replace(row, checkpoint=event.path))] if row else []

    def _step_record(self, event: StepDone, now: Seconds) -> StepRecord:
        members = [member for group in self._batch for member in group.members]
        lengths = sorted(member.generated for member in members)
        staleness = [self._staleness(member) for member in members]
        metrics = event.metrics
        seconds = max(now - self._step_ended, 1e-9)
        return StepRecord(
            step=event.step,
            started_at=self._batch_at,
            ended_at=now,
            waited_s=self._batch_at - self._idle_since,
            reward=fmean(member.reward or 0.0 for member in members),
            logprob_gap=metrics.get("logprob_gap"),
            logprob_gap_tokens=int(metrics.get("logprob_gap_tokens") or 0),
            generated_tokens=sum(lengths),
            context_tokens=sum(len(member.token_ids) for member in members),
            mean_length=fmean(lengths),
            p99_length=float(lengths[int(0.99 * (len(lengths) - 1))]),
            staleness_mean=fmean(staleness),
            staleness_max=max(staleness),
            tokens_per_s=sum(lengths) / seconds,
            trainer_s=metrics.get("trainer_s") or 0.0,
            checkpoint="",
            metrics_json=to_metrics_json(
                {name: value for name, value in metrics.items() if name not in _WITH_A_PLACE}
            ),
        )

    def check(self) -> None:
        """Invariants that hold between any two events."""
        busy = self.state is TrainerState.BUSY
        assert not busy or self.published is not None, "busy before the first version"
        assert self.step >= self.checkpoint_step, f"step {self.step} < {self.checkpoint_step}"
