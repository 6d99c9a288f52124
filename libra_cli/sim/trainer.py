"""The trainer and its gradient workers in virtual time: how long each optimizer step takes.

A step ends when the slowest of those that compute a part of it has: the base group its own groups,
each gradient worker its partition, once it has loaded the newest version, and sent its gradients,
as many bytes however small its partition is. What a step costs whatever is in it comes after that,
once, on the base group, and so do its later updates, if it has several. Where servers share cores
with the trainer, a step passes more slowly while any server has work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import assert_never

from libra_cli.config.age_metrics import AGE_KL, AGE_TOKENS, AGE_WORTH, OLDEST
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.partition import of_first_update
from libra_cli.core.types import Seconds, Slot, SlotId, Tokens, WeightVersion

StepSeconds = Callable[[tuple[a.TrainSample, ...], int], Seconds]
"""Seconds of an optimizer step on these trajectories with so many GPUs."""


@dataclass(slots=True)
class _Partition:
    """The part of a step that one gradient worker computes."""

    given: a.BatchPartition
    samples: tuple[a.TrainSample, ...]
    busy_s: Seconds
    """Seconds that the worker computes."""
    seconds: Seconds
    """Seconds from the beginning of the step until the trainer has the worker's gradients."""
    lost: str = ""

    @property
    def tokens(self) -> Tokens:
        """Tokens of the forward passes."""
        return sum(len(sample.tokens.token_ids) for sample in self.samples)


@dataclass(slots=True)
class _Step:
    """A step under way: ``left`` seconds of it at ``at``, passing at ``rate``."""

    action: a.Train
    began: Seconds
    at: Seconds
    own: tuple[a.TrainSample, ...]
    """Samples of the first update that the base group computes."""
    own_s: Seconds
    """Seconds of these on the base group."""
    after_s: Seconds
    """Seconds of later updates, and those that a step takes whatever is in it."""
    partitions: list[_Partition]
    crowding: float
    left: Seconds = 0.0
    rate: float = 1.0

    @property
    def seconds(self) -> Seconds:
        """Seconds until the slowest part is done, at full speed."""
        working = [part.seconds for part in self.partitions if not part.lost]
        return self.after_s + self.crowding * max([self.own_s, *working])


@dataclass(slots=True, kw_only=True)
class SimTrainer:
    """The trainer in virtual time. ``later`` puts an event on the heap; ``clock`` tells the virtual
    time.

    ``slowdown`` is how many times as long a step takes while a server has work; ``gradient_s`` how
    long a worker's gradients travel, ``fixed_s`` what a step costs whatever is in it, and
    ``rank_slowdown`` by which share of it each rank beyond the first slows the others. ``shared``
    is the share of a step's computing that its first update has, the first of ``minibatches`` in a
    pass, which the run's ``seed`` deals. A token is worth exp(-``decay``) times as much with each
    version that it is behind.
    """

    slots: Mapping[SlotId, Slot]
    step_s: StepSeconds
    slowdown: float
    later: Callable[[e.Event, Seconds], None]
    clock: Callable[[], Seconds]
    gradient_s: Seconds = 0.0
    fixed_s: Seconds = 0.0
    shared: float = 1.0
    minibatches: int = 1
    seed: int = 0
    resize_s: Seconds = 0.0
    decay: float = 0.0
    rank_slowdown: float = 0.0
    base: tuple[SlotId, ...] = ()
    #: When each step, or the last part of it, began and ended; when the parts before did.
    trained: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    parts: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    #: When the workers have loaded the newest version.
    loaded_at: dict[SlotId, Seconds] = field(default_factory=dict)
    _step: _Step | None = None
    _due: e.StepDone | None = None
    _done: int = 0

    def perform(self, action: a.TrainerAction) -> None:
        """Start or stop the trainer, or begin a step, a part of one
        or a checkpoint, in virtual time.
        """
        match action:
            case a.StartTrainer():
                self._start(action)
            case a.StopTrainer():
                self.later(e.TrainerStopped(action.incarnation), 0.0)
            case a.Train():
                self._train(action)
            case a.Accumulate():
                self._accumulate(action)
            case a.Checkpoint():
                self.saved(action)
            case _:
                assert_never(action)

    def saved(self, asked: a.Train | a.Checkpoint) -> None:
        """The checkpoint that was asked for is written at once."""
        self.later(e.CheckpointSaved(asked.incarnation, asked.step, "simulated"), 0.0)

    def _start(self, action: a.StartTrainer) -> None:
        """Start every rank at once, or after ``resize_s`` if the trainer goes on from a step."""
        after_s = self.resize_s if action.resume else 0.0
        self.base = action.train
        step = self._done if action.resume else 0
        published = self._published(action.incarnation, step, self.clock() + after_s)
        self.later(e.TrainerStarted(action.incarnation, published), after_s)

    def _accumulate(self, action: a.Accumulate) -> None:
        """A part of the next step's batch, on the base group."""
        done = e.Accumulated(action.incarnation, action.step, action.part)
        took = self._seconds(action.samples, self.base)
        self.parts.append((self.clock(), self.clock() + took))
        self.later(done, took)

    def _train(self, action: a.Train) -> None:
        """Begin a step and schedule its end."""
        shared = {one: share.slot for share in action.shares for one in share.trajectories}
        dealt: dict[SlotId | None, list[a.TrainSample]] = {}
        first = self._of_first_update(action)
        for sample in first:
            dealt.setdefault(shared.get(sample.trajectory.id), []).append(sample)
        own = tuple(dealt.get(None, ()))
        partitions = [
            self._partition(share, tuple(dealt.get(share.slot, ())), action)
            for share in action.shares
        ]
        now = self.clock()
        own_s = self._once_s(own, self.base, action)
        crowding = 1 + self.rank_slowdown * (self._ranks(partitions) - 1)
        after_s = self.fixed_s + self._later_s(action)
        self._step = step = _Step(action, now, now, own, own_s, after_s, partitions, crowding)
        step.left = step.seconds
        self._schedule(step)

    def _of_first_update(self, action: a.Train) -> tuple[a.TrainSample, ...]:
        seed = (self.seed, action.step)
        return of_first_update(action.samples, minibatches=self.minibatches, seed=seed)

    def drop(self, worker: SlotId, why: str) -> None:
        """Let the base group compute the share of a worker that is gone, after its own part."""
        step = self._step
        for part in step.partitions if step else ():
            if step is None or part.lost or part.given.slot != worker:
                continue
            self._pass(step)
            before = step.seconds
            part.lost = why
            step.own += part.samples
            step.own_s = self._once_s(step.own, self.base, step.action)
            step.left += max(0.0, step.seconds - before)
            self._schedule(step)

    def pace(self, *, servers_work: bool) -> None:
        """Let the step under way go on at the speed that the servers leave it."""
        step = self._step
        if step is None or self.slowdown <= 1.0:
            return
        rate = 1.0 / self.slowdown if servers_work else 1.0
        if rate != step.rate:
            self._pass(step)
            step.rate = rate
            self._schedule(step)

    def ends(self, event: e.StepDone) -> a.Train | None:
        """Return the step that ends with this event; None if it has
        become faster or slower since.
        """
        step = self._step
        if event is not self._due or step is None:
            return None
        self.trained.append((step.began, self.clock()))
        self._step, self._done = None, event.step
        return step.action

    def _pass(self, step: _Step) -> None:
        now = self.clock()
        step.left -= (now - step.at) * step.rate
        step.at = now

    def _schedule(self, step: _Step) -> None:
        took = step.left / step.rate
        incarnation, number = step.action.incarnation, step.action.step
        self._due = e.StepDone(
            incarnation,
            number,
            self._published(incarnation, number, self.clock() + took),
            {
                "own_tokens": float(_tokens(step.own)),
                "own_s": step.own_s,
                **_worth_by_age(step.action.samples, self.decay),
            },
            tuple(self._share_done(part, step) for part in step.partitions),
        )
        self.later(self._due, took)

    def _share_done(self, part: _Partition, step: _Step) -> e.ShareDone:
        return e.ShareDone(
            slot=part.given.slot,
            incarnation=part.given.incarnation,
            used=not part.lost,
            reason=part.lost,
            tokens=part.tokens,
            seconds=None if part.lost else part.busy_s,
            waited_s=0.0 if part.lost else max(0.0, part.seconds - step.own_s),
            bytes=0,
            transfer_s=0.0 if part.lost else self.gradient_s,
        )

    def _partition(
        self, given: a.BatchPartition, samples: tuple[a.TrainSample, ...], action: a.Train
    ) -> _Partition:
        busy_s = self._once_s(samples, (given.slot,), action)
        loading_s = max(0.0, self.loaded_at.get(given.slot, 0.0) - self.clock())
        return _Partition(given, samples, busy_s, loading_s + busy_s + self.gradient_s)

    def _later_s(self, action: a.Train) -> Seconds:
        """Seconds of a step's later updates, on the base group."""
        if self.shared == 1:
            return 0.0
        beside = 1 + self.rank_slowdown * (self._gpus(self.base) - 1)
        return beside * (1 - self.shared) * self._seconds(action.samples, self.base)

    def _once_s(
        self, samples: tuple[a.TrainSample, ...], slots: Sequence[SlotId], action: a.Train
    ) -> Seconds:
        """Seconds of these samples of a step's first update, which has its share of the whole."""
        alone_s = self._seconds(samples, slots)
        if self.shared == 1 or not alone_s:
            return alone_s
        of_first_s = self._seconds(self._of_first_update(action), slots)
        return self.shared * self._seconds(action.samples, slots) * alone_s / of_first_s

    def _seconds(self, samples: tuple[a.TrainSample, ...], slots: Sequence[SlotId]) -> Seconds:
        if not samples:
            return 0.0
        return max(0.0, self.step_s(samples, self._gpus(slots)) - self.fixed_s)

    def _ranks(self, partitions: Sequence[_Partition]) -> int:
        """Ranks of a step, of the base group and of workers that compute a part."""
        return self._gpus([*self.base, *(part.given.slot for part in partitions if part.samples)])

    def _gpus(self, slots: Sequence[SlotId]) -> int:
        return sum(self.slots[slot].num_devices for slot in slots)

    def _published(self, incarnation: int, step: int, at: Seconds) -> e.PublishedVersion:
        return e.PublishedVersion(WeightVersion(incarnation, step), 0, at)


def _worth_by_age(samples: Sequence[a.TrainSample], decay: float) -> dict[str, float]:
    """Return what a trainer would tell of the tokens of a step by their age.

    Log ratios are normal, so that their KL divergence is half of what is lost of the worth.
    """
    tokens: dict[int, float] = {}
    for sample in samples:
        for behind, start, end in sample.tokens.behind(sample.held):
            age = min(behind, OLDEST)
            tokens[age] = tokens.get(age, 0.0) + end - start
    told = {AGE_TOKENS.format(age): number for age, number in tokens.items()}
    told |= {AGE_WORTH.format(age): exp(-decay * age) for age in tokens}
    return told | {AGE_KL.format(age): decay * age / 2 for age in tokens}


def _tokens(samples: Sequence[a.TrainSample]) -> Tokens:
    return sum(len(sample.tokens.token_ids) for sample in samples)


@dataclass(frozen=True, slots=True)
class SimWorkers:
    """The gradient workers beside a trainer. ``start_s`` is how long one starts that was not there
    from the beginning, ``sync_s`` how long a version takes to be loaded.
    """

    trainer: SimTrainer
    start_s: Seconds
    sync_s: Seconds

    def perform(self, action: a.WorkerAction) -> None:
        """Start, sync or stop a gradient worker, in virtual time."""
        trainer = self.trainer
        match action:
            case a.StartWorker(slot, incarnation):
                after_s = self.start_s if trainer.clock() else 0.0
                trainer.later(e.WorkerStarted(slot, incarnation), after_s)
            case a.SyncWorker():
                self._sync(action)
            case a.StopWorker(slot, incarnation):
                trainer.drop(slot, "the worker was stopped")
                trainer.later(e.WorkerStopped(slot, incarnation), 0.0)
            case _:
                assert_never(action)

    def _sync(self, action: a.SyncWorker) -> None:
        new, took = action.published, self.sync_s if action.published.version.step else 0.0
        at = self.trainer.loaded_at[action.slot] = self.trainer.clock() + took
        synced = e.WorkerSynced(action.slot, action.incarnation, new, 0.0, took, 0.0, at)
        self.trainer.later(synced, took)
