"""When evaluations begin, and how long the end of a run waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra_cli.core.actions import Save, Wake
from libra_cli.core.evaluation.ledger import EvaluationState
from libra_cli.core.notices import Result
from libra_cli.core.records import EvaluationRecord, Record
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Seconds

STALLED_S: Seconds = 1800.0
"""Once nothing is trained any more, evaluations of which no turn has come back for so long are cut.
Chosen: a turn of 64,000 tokens takes less, at 40 a second."""


def remember(parts: RunParts, records: Sequence[Record]) -> None:
    """Take in the rows that a run wrote before it goes on."""
    training = parts.training
    for record in records:
        if isinstance(record, EvaluationRecord) and record.step <= training.step:
            _score(parts, record)
    parts.evaluations.remember(records, training.step, training.checkpoints.still_holds)


def saw(parts: RunParts, record: Record) -> None:
    """Tell the trainer what its checkpoints are worth, by a row that is being written."""
    if isinstance(record, EvaluationRecord):
        _score(parts, record)


def _score(parts: RunParts, record: EvaluationRecord) -> None:
    """The first evaluation of the recipe is what checkpoints are scored by."""
    if record.name not in parts.recipe.evaluation_names[:1]:
        return
    checkpoints = parts.training.checkpoints
    if record.state == EvaluationState.RUNNING:
        checkpoints.evaluation_began(record.step)
    else:
        checkpoints.evaluation_ended(record.step, record.score, record.trainer_incarnation)


def cut_left(parts: RunParts, *, now: Seconds) -> Iterator[Result]:
    """End the evaluations that no process plays any more, in a run that goes on."""
    yield from map(Save, parts.evaluations.cut_left(now=now))


def are_done(parts: RunParts) -> bool:
    """Whether no evaluation is left that the end of the run waits for."""
    return parts.evaluations.is_done(parts.recipe.run.steps)


def evaluate(parts: RunParts, *, now: Seconds) -> Iterator[Result]:
    """Begin evaluations that are due, and trajectories of those that are under way."""
    if parts.servers.latest is None:
        return
    latest, target = parts.servers.latest.version, parts.recipe.run.steps
    yield from map(Save, parts.evaluations.begin_due(latest, target=target, now=now))
    if parts.evaluations.running:
        yield from parts.rollout.evaluate(now=now)


def cut(parts: RunParts, why: str, *, now: Seconds) -> Iterator[Result]:
    """Cut every running evaluation, so that the end of the run waits for none."""
    for one in list(parts.evaluations.running.values()):
        yield from parts.rollout.cut(one, why, now=now)


def wake(after_s: Seconds = STALLED_S) -> Wake:
    """The timer at which it is looked whether evaluations go on."""
    return Wake(TimerKey(TimerOwner.EVALUATING).name, after_s)


def stalled(parts: RunParts, *, now: Seconds) -> Iterator[Result]:
    """Cut the evaluations of which no turn has come back for
    ``STALLED_S``, once training is over.
    """
    if not parts.scheduler.training_over:
        return
    quiet_s = now - parts.evaluations.went_on_at if parts.evaluations.running else 0.0
    if quiet_s < STALLED_S:
        yield wake(STALLED_S - quiet_s)
        return
    yield from cut(parts, f"no turn of it came back for {quiet_s:.0f} s", now=now)
    parts.evaluations.close()
