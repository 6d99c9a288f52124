"""The trainer: one accelerate world on the train slots, one optimizer step at a time.

Its processes (``trainer_life``), the batch that is in them (``step_batch``) and the rows of its
steps (``step_book``) know nothing of one another. Here is what joins them: a batch is claimed while
the trainer is READY, a trainer that comes back is given again what the ledger had given it since
its checkpoint, and a resize waits for the step under way and its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, assert_never

from libra_cli.core.actions import (
    Accumulate,
    Checkpoint,
    Save,
    StartTrainer,
    StopTrainer,
    Train,
    TrainerAction,
)
from libra_cli.core.cluster.checkpoints import Checkpoints
from libra_cli.core.cluster.replica import Replica
from libra_cli.core.cluster.step_batch import StepBatch
from libra_cli.core.cluster.step_book import StepBook
from libra_cli.core.cluster.step_record import mean_reward
from libra_cli.core.cluster.trainer_life import TrainerLife, TrainerState
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
from libra_cli.core.notices import (
    ResizeRefused,
    Result,
    StepClaimed,
    StepOver,
    StepTaken,
    VersionOut,
    VersionsLost,
)
from libra_cli.core.records import NoteRecord, StepRecord, VersionRecord
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.rollout.rows import group_records
from libra_cli.core.types import LostGpu, Seconds, Slot, SlotId, WeightVersion

NEXT = "another is tried with the next step: mend the cause before then"


class TrainerGroup:
    """The trainer and its steps. Methods return the actions they call for."""

    events: ClassVar[Any] = TrainerEvent | NodeEvent
    actions: ClassVar[Any] = TrainerAction

    def __init__(
        self,
        ledger: GroupLedger,
        slots: Iterable[Slot],
        batch: StepBatch,
        *,
        checkpoint_every: int,
    ) -> None:
        self._ledger = ledger
        self.life = TrainerLife(slots)
        self.checkpoints = Checkpoints(checkpoint_every)
        self.batch = batch
        self._book = StepBook(ledger)
        self.step = 0
        self.published: PublishedVersion | None = None

    def handle(self, event: TrainerEvent | NodeEvent, *, now: Seconds) -> Iterable[Result]:
        """Return what follows from an event of the trainer, or of a
        node that may hold one of its ranks.
        """
        match event:
            case NodeLost():
                return ()
            case NodeBack(node):
                return self.life.back(node, now=now)
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
                return self.gone(event.lost, now=now)
            case StepDone():
                return self._step_done(event, now)
            case VersionPublished():
                return self.version_published(event.published)
            case Accumulated():
                return self.accumulated(event, now=now)
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

    # -- what is --------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        return self.life.state

    @property
    def incarnation(self) -> int:
        """The number of trainers started so far, which numbers the present one."""
        return self.life.incarnation

    @property
    def detail(self) -> str:
        """Why the trainer was stopped last; empty if it never was."""
        return self.life.detail

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of its ranks, in rank order."""
        return self.life.replicas

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """The slots of its ranks, in rank order."""
        return self.life.slots

    @property
    def streaming(self) -> bool:
        """Whether a part of the next step is in already."""
        return self.batch.parts > 0

    @property
    def current_version(self) -> WeightVersion:
        return WeightVersion(self.incarnation, self.step)

    @property
    def published_step(self) -> int:
        """The newest step whose version can be fetched."""
        return self.published.version.step if self.published else self.step

    @property
    def publishing(self) -> bool:
        """Whether the version of a step that is done is still being written."""
        told = self.published is not None and self.published.version != self.current_version
        return self.life.up and told

    @property
    def at_work(self) -> bool:
        """Whether a step is being taken, or a version or a checkpoint of one is not written yet."""
        busy = self.state is TrainerState.BUSY
        writing = self.checkpoints.writing or self.publishing
        return busy or (self.state is TrainerState.READY and writing)

    @property
    def work(self) -> str:
        """The name of what the trainer does while it is ``at_work``:
        a step, a version or a checkpoint.
        """
        if self.state is TrainerState.BUSY:
            return f"step {self.step + 1}"
        if self.publishing:
            return f"the version of step {self.step}"
        return f"the checkpoint of step {self.checkpoints.newest}"

    @property
    def free_since(self) -> Seconds:
        """When the trainer was free for the step under way, or for the next one."""
        return self._book.free_since

    @property
    def patience_s(self) -> Seconds:
        """Seconds that the end of a run waits for ``work``."""
        return self._book.patience_s

    # -- coming and going -----------------------------------------------------------------------

    def start(self, *, now: Seconds) -> list[Result]:
        """Start every rank, from the last checkpoint if there is one."""
        return self.life.start(self.checkpoints.path, now=now)

    def restart(self, *, now: Seconds) -> list[Result]:
        """Start the trainer from the last checkpoint, when its wait before a restart is over."""
        return self.life.restart(self.checkpoints.path, now=now)

    def in_room(self, *, now: Seconds) -> list[Result]:
        """Start the trainer, from the last checkpoint, on slots to which it returns and that are
        free again.
        """
        return self.life.in_room(self.checkpoints.path, now=now)

    def gone(self, lost: Sequence[LostGpu] = (), *, now: Seconds) -> list[Result]:
        """Start the trainer, which is verified gone, again if the run goes on and its budget
        allows, without the slots whose GPUs are ``lost``.
        """
        return self.life.gone(self.checkpoints.path, lost, now=now)

    def wind_down(self) -> None:
        """A trainer that ends from now on is not started again."""
        self.life.wind_down()

    def started(self, event: TrainerStarted, *, now: Seconds) -> list[Result]:
        """Go on from the step of the trainer that has started;
        later batches are given to it again.
        """
        if self.state is not TrainerState.STARTING:
            return []
        moved = self.life.started(now=now)
        self._book.idle(now=now)
        self.step = event.published.version.step
        self.checkpoints.forget_asked()
        self.checkpoints.begins(self.incarnation, self.step)
        told = self.batch.begin(self.step, now=now)
        return [*told, *moved, *self.version_published(event.published)]

    def failed(self, reason: str, *, now: Seconds) -> list[Result]:
        """Stop the trainer after a rank died or a step failed."""
        if self.life.is_over:
            return []
        self.life.failed(reason)
        busy = self.state is TrainerState.BUSY
        dropped = self.batch.died(reason, now=now) if busy else []
        return [*dropped, *self.stop(reason, now=now)]

    def stop(self, why: str, *, now: Seconds) -> list[Result]:
        """Stop every rank, and end the step under way without a result."""
        if self.life.is_over:
            return []
        if self.state is TrainerState.READY and not self.streaming:
            self.life.worked(now=now)  # a step that is not done is of no use
        return [*self.life.stop(why, now=now), StepOver()]

    def node_gone(self, node: str, why: str, *, now: Seconds) -> list[Result]:
        """Stop the trainer if one of its ranks ran on a node that is given up."""
        lost = [VersionsLost()] if node == self.replicas[0].slot.node else []
        died = self.life.node_gone(node, now=now)
        return [*lost, *(self.failed(why, now=now) if died else [])]

    def resize(self, slots: list[Slot], *, now: Seconds) -> list[Result]:
        """Move to these slots once the step under way is done and saved; none: stay."""
        self.life.next = slots
        return self._prepare_resize(now)

    def _prepare_resize(self, now: Seconds) -> list[Result]:
        """Save a checkpoint if the last is older, else stop for the
        resize; the rest follows from the events.
        """
        if not self.life.next or self.state is not TrainerState.READY or self.publishing:
            return []
        if self.step > max(self.checkpoints.step, 0) or self.checkpoints.writing:
            if not self.checkpoints.given_up(self.step):
                return self.save(now=now)
            self.life.next = []
            return [ResizeRefused(self.checkpoints.unsaved)]
        return self.stop("the trainer is resized", now=now)

    # -- steps ----------------------------------------------------------------------------------

    def claim(self, *, now: Seconds, target: int) -> list[Result]:
        """Train on the next batch, or a part of it, if the trainer is free and it is there."""
        if self.life.next:
            return self._prepare_resize(now)
        if self.state is not TrainerState.READY or self.step >= target:
            return []
        if self.batch.is_full:
            self._book.full(now=now)
        results, groups, whole = self.batch.claim(self.step + 1, now=now)
        if not groups:
            return results
        if self.streaming:
            self._book.part_began(now=now)
        else:
            self._book.began(now=now)
            self.life.worked(now=now)
        self.life.enter(TrainerState.BUSY)
        self.batch.send(groups)
        return [*results, self._train(groups, target, now) if whole else self._accumulate(groups)]

    def _accumulate(self, groups: list[Group]) -> Accumulate:
        part = self.batch.send_part()
        given = self.batch.samples_of(groups, self.current_version)
        return Accumulate(self.incarnation, self.step + 1, part, given)

    def _train(self, last: list[Group], target: int, now: Seconds) -> StepClaimed:
        step = self.step + 1
        save = self.checkpoints.is_due(step, target)
        self.checkpoints.learn_reward(step, mean_reward(self.batch.groups))
        again = self.batch.draw_again(step, self.step)
        ledger = self._position(step) if save else None
        if save:
            self._save_asked(step, now)
        train = Train(
            self.incarnation,
            step,
            self.batch.samples_of([*last, *again], self.current_version),
            ledger,
            held=self.current_version,
            parts=self.batch.parts,
        )
        return StepClaimed(train)

    def accumulated(self, event: Accumulated, *, now: Seconds) -> list[Result]:
        """Be ready for the next part, or for the step, after the part waited for."""
        awaited = self.state is TrainerState.BUSY and event.step == self.step + 1
        if awaited and self.batch.accumulated(event):
            self._book.part_ended(now=now)
            self.life.enter(TrainerState.READY)
        return []

    def _step_done(self, event: StepDone, now: Seconds) -> Iterator[Result]:
        if self.state is not TrainerState.BUSY or event.step <= self.step:
            return
        yield from self.done(event, now=now)
        for group in self.batch.groups:
            yield from map(Save, group_records(group, now))
        if event.published:
            yield from self.version_published(event.published)
        yield StepTaken(self.last)

    def done(self, event: StepDone, *, now: Seconds) -> list[Result]:
        """Record a step that is done: its row, its credits, and its end for gradient workers."""
        self.life.enter(TrainerState.READY)
        self.batch.learn_advantages(event)
        row = self._book.done(event, self.batch, self.current_version, now=now)
        self.step = event.step
        self.life.worked(now=now)
        self.batch.done(event.step)
        tokens, seconds = event.metrics.get("own_tokens"), event.metrics.get("own_s")
        over = StepOver(event.shares, tokens or 0.0, seconds or 0.0)
        return [Save(row), *map(Save, self.batch.credits(event)), over]

    @property
    def last(self) -> StepRecord:
        """The row of the last step that is done."""
        row = self._book.row(self.step)
        assert row is not None, f"step {self.step} is not done"
        return row

    def version_published(self, published: PublishedVersion) -> list[Result]:
        """Record a version that can be fetched; nothing if it is
        known, or its step is yet to be told.
        """
        known = self.published is not None and published.version <= self.published.version
        if known or published.version.step > self.step:
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

    # -- checkpoints ----------------------------------------------------------------------------

    def remember(self, path: str, step: int) -> None:
        """Note the checkpoint of ``step``, from which a restart begins."""
        self.checkpoints.remember(path, step)
        self._ledger.settle(step)

    def _save_asked(self, step: int, now: Seconds) -> None:
        self.checkpoints.asked(step)
        self._book.save_asked(now=now)

    def _position(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of ``step`` records of the run: the
        ledger's position, and its scores.
        """
        return {**self._ledger.position(step), **self.checkpoints.told(step)}

    def save(self, *, now: Seconds) -> list[Result]:
        """Write a checkpoint now, if the trainer can and the last one is older."""
        known = self.step <= self.checkpoints.newest or self.checkpoints.given_up(self.step)
        if self.state is not TrainerState.READY or known:
            return []
        self._save_asked(self.step, now)
        return [Checkpoint(self.incarnation, self.step, self._position(self.step))]

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
            self._book.saved(now=now)
        row = self._book.row(event.step)
        return [*results, Save(replace(row, checkpoint=event.path))] if row else results

    def save_failed(self, event: CheckpointFailed, *, now: Seconds) -> list[Result]:
        """Note that a checkpoint could not be written; the next step asks for another."""
        if not self.checkpoints.failed(event.step, event.reason):
            return []
        return [Save(NoteRecord("checkpoint", "", now, f"{self.checkpoints.unsaved}; {NEXT}"))]

    def check(self) -> None:
        """Raise AssertionError if the trainer is busy before its first
        version, or behind its checkpoint.
        """
        busy = self.state is TrainerState.BUSY
        assert not busy or self.published is not None, "busy before the first version"
        assert self.step >= self.checkpoints.step, f"step {self.step} < {self.checkpoints.step}"
