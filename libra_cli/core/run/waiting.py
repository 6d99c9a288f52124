"""The sentence for people on what in a run waits for what."""

from __future__ import annotations

from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.records import ENDING
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.state import Phase


def waiting(parts: RunParts) -> str:
    """Return a sentence on what waits for what in the run, now."""
    phase, trainer = parts.run.phase, parts.training.state
    if phase in (Phase.DRAINING, Phase.STOPPING):
        return f"{ENDING} ({parts.run.outcome})"
    if not parts.rollout.needs_seats:
        at_work = trainer in (TrainerState.READY, TrainerState.BUSY)
        return "nobody waits" if at_work else "everything waits for the trainer to start"
    if phase is Phase.STARTING:
        return "everyone waits for the first server and the trainer to start"
    return _of_both_halves(parts, trainer)


def _of_both_halves(parts: RunParts, trainer: TrainerState) -> str:
    if trainer in (TrainerState.DOWN, TrainerState.STARTING, TrainerState.STOPPING):
        return "rollout goes on up to the staleness bound; the trainer is starting again"
    if not parts.scheduler.queues.seats:
        return "training waits for rollout: no server is serving"
    ledger = parts.ledger
    if trainer is TrainerState.BUSY and not ledger.may_open and not ledger.playing:
        return "rollout waits for training: the staleness bound is reached"
    return _of_training(parts) if trainer is TrainerState.READY else "nobody waits"


def _of_training(parts: RunParts) -> str:
    if parts.rollout.waits_for:
        return f"training waits for rollout, and rollout for {parts.rollout.waits_for}"
    if parts.scheduler.training_over:
        return "training is done; the run ends when the last version is evaluated"
    if parts.ledger.batch_is_full:
        return "training waits for rollout: groups that this step is the last one for"
    return "training waits for rollout: the next batch is not full"
