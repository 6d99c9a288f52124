"""The trainer: one accelerate world on the train slots, one optimizer step at a time.

A trainer that dies is started again from the last checkpoint: at most once a minute, three times a
run. It comes back as a new trainer *epoch*; what the ledger had given it since that checkpoint is
given to it again, and the servers go back to its version. A trainer that never started has a
configuration error and is not tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from json import dumps

from libra_cli.core.actions import (
    Action,
    Checkpoint,
    Sample,
    Save,
    StartTrainer,
    StopTrainer,
    Train,
    Wake,
)
from libra_cli.core.events import CheckpointSaved, Published, StepDone, TrainerStarted
from libra_cli.core.ledger import Group, Ledger
from libra_cli.core.records import BatchRecord, StepRecord, VersionRecord
from libra_cli.core.slots import SlotState, SlotStatus, slot_record
from libra_cli.core.types import Role, Seconds, Slot, Trajectory

MAX_RESTARTS = 3
RESTART_EVERY_S: Seconds = 60.0
TIMER = "restart trainer"


_ROLES = {SlotState.FAILED: Role.FAILED, SlotState.IDLE: Role.IDLE}


class TrainerState(StrEnum):
    """What the trainer does now."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    STOPPING = "stopping"
    FAILED = "failed"


class Training:
    """The trainer and its steps. Methods return the actions they call for."""

    def __init__(self, ledger: Ledger, slots: Iterable[Slot], *, checkpoint_every: int) -> None:
        self._ledger = ledger
        self._every = checkpoint_every
        self.slots = [SlotStatus(slot, since=0.0, role=Role.TRAIN) for slot in slots]
        self.state = TrainerState.DOWN
        self.epoch = 0
        self.step = 0
        self.published: Published | None = None
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
        self._rows: dict[int, StepRecord] = {}
        self._step_ended: Seconds = 0.0

    # -- coming and going -----------------------------------------------------------------------

    def start(self, *, now: Seconds) -> list[Action]:
        """Start every rank, from the last checkpoint if there is one."""
        self.state, self._started_at = TrainerState.STARTING, now
        self.epoch += 1
        ids = tuple(status.slot.id for status in self.slots)
        return [
            StartTrainer(self.epoch, ids, self.checkpoint),
            *self._move(SlotState.STARTING, now=now),
        ]

    def started(self, event: TrainerStarted, *, now: Seconds) -> list[Action]:
        """Ready at some step; what the ledger gave it beyond that is given to it again."""
        self.state, self._ever_started = TrainerState.READY, True
        self._idle_since = self._step_ended = now
        self.step = event.published.version
        self._asked_step = self.checkpoint_step
        self._ledger.rollback(self.step)
        self._batch = []
        return [*self._publish(event.published), *self._move(SlotState.TRAINING, now=now)]

    def _publish(self, published: Published) -> list[Action]:
        self.published = published
        row = VersionRecord(
            version=published.version,
            trainer_epoch=published.trainer_epoch,
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
        ids = tuple(status.slot.id for status in self.slots)
        return [StopTrainer(self.epoch, ids), *self._move(SlotState.STOPPING, now=now, why=why)]

    def gone(self, *, now: Seconds, again: bool) -> list[Action]:
        """Verified gone. Start it again if the run goes on and it may."""
        self.state = TrainerState.DOWN
        actions = self._move(SlotState.IDLE, now=now, why=self.detail)
        if not again:
            return actions
        if not self._ever_started or self._restarts >= MAX_RESTARTS:
            self.state = TrainerState.FAILED
            return [*actions, *self._move(SlotState.FAILED, now=now, why=self.detail)]
        self._restarts += 1
        return [*actions, Wake(TIMER, max(0.0, self._started_at + RESTART_EVERY_S - now))]

    def restart(self, *, now: Seconds) -> list[Action]:
        """The minute is over."""
        return self.start(now=now) if self.state is TrainerState.DOWN else []

    def _move(self, to: SlotState, *, now: Seconds, why: str = "") -> list[Action]:
        for status in self.slots:
            status.move(to, now=now, why=why)
            status.epoch = self.epoch
            status.restarts = self._restarts
            status.role = _ROLES.get(to, Role.TRAIN)
        return [Save(slot_record(status, now=now)) for status in self.slots]

    # -- steps ----------------------------------------------------------------------------------

    def claim(self, *, now: Seconds, target: int) -> list[Action]:
        """Train on the next batch, if the trainer is free and the batch is there."""
        if self.state is not TrainerState.READY or self.step >= target:
            return []
        assert self.published is not None
        step = self.step + 1
        self._batch = self._ledger.claim(step)
        if not self._batch:
            return []
        self.state, self._batch_at = TrainerState.BUSY, now
        trajectories = [member for group in self._batch for member in group.members]
        samples = tuple(self._sample(trajectory) for trajectory in trajectories)
        save = step % self._every == 0 or step >= target
        row = BatchRecord(
            step=step,
            groups_json=dumps([group.id for group in self._batch]),
            trajectories=len(trajectories),
            generated_tokens=sum(trajectory.generated for trajectory in trajectories),
            created_at=now,
        )
        ledger = self._ledger.position(step) if save else None
        if save:
            self._asked_step = step
        return [Train(self.epoch, step, samples, ledger), Save(row)]

    def _sample(self, trajectory: Trajectory) -> Sample:
        assert self.published is not None
        fresh = trajectory.pure == self.published.key
        return Sample(trajectory, self._staleness(trajectory), fresh)

    def _staleness(self, trajectory: Trajectory) -> int:
        oldest = self.step if trajectory.min_version is None else trajectory.min_version
        # After a rollback the oldest token may come from a version yet to be trained again.
        return max(0, self.step - oldest)

    def done(self, event: StepDone, *, now: Seconds) -> list[Action]:
        """A step is done and published: its row, and what the checkpoint makes forgettable."""
        row = self._rows[event.step] = self._step_record(event, now)
        self._rows.pop(event.step - 8, None)
        self.state, self.step = TrainerState.READY, event.step
        self._idle_since = self._step_ended = now
        self._ledger.trained(event.step)
        return [*self._publish(event.published), Save(row)]

    def remember(self, path: str, step: int) -> None:
        """A checkpoint of ``step`` exists: this is where a restart begins."""
        self.checkpoint, self.checkpoint_step = path, step
        self._ledger.settle(step)

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
        return [Checkpoint(self.epoch, self.step, self._ledger.position(self.step))]

    @property
    def at_work(self) -> bool:
        """Whether a step is being taken or a checkpoint that was asked for is not written yet."""
        saving = self._asked_step > self.checkpoint_step
        busy = self.state is TrainerState.BUSY
        return busy or (self.state is TrainerState.READY and saving)

    def saved(self, event: CheckpointSaved) -> list[Action]:
        """A checkpoint is written."""
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
            reward=_mean([member.reward or 0.0 for member in members]),
            loss=metrics.get("loss") or 0.0,
            grad_norm=metrics.get("grad_norm") or 0.0,
            learning_rate=metrics.get("learning_rate") or 0.0,
            kl=metrics.get("kl"),
            entropy=metrics.get("entropy") or 0.0,
            clip_fraction=metrics.get("clip_fraction") or 0.0,
            tis_mean=metrics.get("tis_mean") or 0.0,
            logprob_gap=metrics.get("logprob_gap"),
            logprob_gap_tokens=int(metrics.get("logprob_gap_tokens") or 0),
            generated_tokens=sum(lengths),
            context_tokens=sum(len(member.token_ids) for member in members),
            mean_length=_mean(lengths),
            p99_length=float(lengths[int(0.99 * (len(lengths) - 1))]),
            staleness_mean=_mean(staleness),
            staleness_max=max(staleness),
            tokens_per_s=sum(lengths) / seconds,
            trainer_s=metrics.get("trainer_s") or 0.0,
            checkpoint="",
        )

    def check(self) -> None:
        """Invariants that hold between any two events."""
        busy = self.state is TrainerState.BUSY
        assert not busy or self.published is not None, "busy before the first version"
        assert self.step >= self.checkpoint_step, f"step {self.step} < {self.checkpoint_step}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
