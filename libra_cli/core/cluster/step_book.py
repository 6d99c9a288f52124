"""The rows of the steps, and how long each half waited for the other."""

from __future__ import annotations

from math import inf

from libra_cli.core.cluster.step_batch import StepBatch
from libra_cli.core.cluster.step_record import StepPeriod, step_record
from libra_cli.core.events import StepDone
from libra_cli.core.records import StepRecord
from libra_cli.core.rollout.batches import batch_metrics
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.types import Seconds, WeightVersion

PATIENCE_S: Seconds = 1800.0
"""Seconds that the end of a run waits for a step or a checkpoint under way: the time-out of the
trainer's collectives, by which a rank that hangs ends the others (``torch.distributed``).
"""
KEPT = 8
"""Steps whose rows are kept: a checkpoint that is written later completes the row of its own."""


class StepBook:
    """The rows of the last steps, and the times from which the next row is computed."""

    def __init__(self, ledger: GroupLedger) -> None:
        self._ledger = ledger
        self._rows: dict[int, StepRecord] = {}
        #: When the trainer was free for the step under way, or the next one.
        self.free_since: Seconds = 0.0
        #: When the next batch became full while the trainer was free.
        self._full_since: Seconds = inf
        self._began_at: Seconds = 0.0
        #: Of the step under way: when the last of its parts so far ended, the seconds between its
        #: parts, and those in which a full batch waited.
        self._part_ended_at: Seconds = 0.0
        self._between_s: Seconds = 0.0
        self._held_s: Seconds = 0.0
        #: The longest that a step or a checkpoint took, and when the last checkpoint was asked for.
        self._slowest_s: Seconds = 0.0
        self._save_asked_at: Seconds = 0.0

    def row(self, step: int) -> StepRecord | None:
        """Return the row of a step; None unless it is one of the last."""
        return self._rows.get(step)

    @property
    def patience_s(self) -> Seconds:
        """Seconds to wait for what the trainer does: twice the slowest step or checkpoint so far,
        and at least ``PATIENCE_S``.
        """
        return max(PATIENCE_S, 2 * self._slowest_s)

    def idle(self, *, now: Seconds) -> None:
        """The trainer waits for a batch from now on."""
        self.free_since = now
        self._full_since = inf

    def full(self, *, now: Seconds) -> None:
        """Note that a batch is full while the trainer is free, from now on."""
        self._full_since = min(self._full_since, now)

    def began(self, *, now: Seconds) -> None:
        """Note that a step begins, on its whole batch or the first part of it."""
        self._began_at = now
        self._between_s = 0.0
        self._held_s = max(0.0, now - self._full_since)

    def part_ended(self, *, now: Seconds) -> None:
        """The trainer waits for the next part of the step from now on."""
        self._part_ended_at = now
        self._full_since = inf

    def part_began(self, *, now: Seconds) -> None:
        """Note that a part of the step begins that is not the first one."""
        self._between_s += now - self._part_ended_at
        self._held_s += max(0.0, now - self._full_since)

    def save_asked(self, *, now: Seconds) -> None:
        self._save_asked_at = now

    def saved(self, *, now: Seconds) -> None:
        """Note that the checkpoint asked for is written, and count how long that took."""
        self._slowest_s = max(self._slowest_s, now - self._save_asked_at)

    def done(
        self, event: StepDone, batch: StepBatch, held: WeightVersion, *, now: Seconds
    ) -> StepRecord:
        """Return the row of a step done on this batch; ``held`` is the version trained from."""
        row = self._rows[event.step] = self._row_of(event, batch, held, now)
        self._rows.pop(event.step - KEPT, None)
        self._slowest_s = max(self._slowest_s, now - self._began_at)
        self.idle(now=now)
        return row

    def _row_of(
        self, event: StepDone, batch: StepBatch, held: WeightVersion, now: Seconds
    ) -> StepRecord:
        times = StepPeriod(
            began=self._began_at,
            ended=now,
            waited_s=self._began_at - self.free_since + self._between_s,
            between_s=self._between_s,
            held_s=self._held_s,
        )
        played, bound = self._ledger.take_lengths(), self._ledger.rule.bound
        samples = batch.samples(batch.groups, held)
        metrics = batch_metrics(batch.groups, held.step, bound, played)
        metrics |= self._ledger.places.take_metrics(now=now)
        metrics |= self._ledger.models.take_metrics()
        metrics |= batch.metrics(samples, held.step)
        named = self._ledger.named(batch.groups)
        return batch.complete(step_record(event, samples, times, metrics, named))
