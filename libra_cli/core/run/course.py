"""How a run begins, what ends it, and how it is wound down.

Phases: STARTING -> RUNNING -> DRAINING -> STOPPING -> ENDED. In DRAINING nothing new begins, turns
and syncs under way may finish (for ``DRAIN_S`` at most), a step or a checkpoint under way may take
twice as long as the slowest so far, and one last checkpoint is written; in STOPPING every process
is stopped and verified gone. Whoever asks to stop at once skips DRAINING.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from libra_cli.core.actions import Wake
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.events import PlacesCounted, RunStarted, StopRequested
from libra_cli.core.explanation import Explanation
from libra_cli.core.notices import Result
from libra_cli.core.rollout.active import Stage
from libra_cli.core.run import evaluating
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.state import Phase
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Seconds

DRAIN_S: Seconds = 30.0
RESUME = "then: libra run RECIPE --resume RUN_DIR"


class RunCourse:
    """The beginning and the end of a run."""

    events: ClassVar[Any] = RunStarted | PlacesCounted | StopRequested

    def __init__(self, parts: RunParts, explanation: Explanation | None) -> None:
        self._parts = parts
        self._explanation = explanation
        self._drains_since: Seconds = 0.0

    def handle(
        self, event: RunStarted | PlacesCounted | StopRequested, *, now: Seconds
    ) -> Iterator[Result]:
        """Begin the run once hosts are connected, learn what they hold, or end it on request."""
        if isinstance(event, RunStarted):
            return self._begin(now)
        if isinstance(event, PlacesCounted):
            self._parts.ledger.places.number = event.number
            return iter(())
        return self._stop_requested(event, now)

    def _begin(self, now: Seconds) -> Iterator[Result]:
        """Write the first plan's row and start the trainer; servers follow from the plan."""
        parts = self._parts
        parts.run.started_at = now
        yield from evaluating.cut_left(parts, now=now)
        step = parts.training.step
        yield from parts.controller.begin(self._explanation, step=step, now=now)
        yield from parts.training.start(now=now)

    def _stop_requested(self, event: StopRequested, now: Seconds) -> Iterator[Result]:
        if self._parts.run.going:
            yield from self.wind_down("stopped", event.reason, now=now)
        if event.at_once and self._parts.run.phase is Phase.DRAINING:
            yield from self._stop_all(now)

    @property
    def broken(self) -> str:
        """Why the run cannot go on; empty while it can."""
        training, rollout = self._parts.training, self._parts.rollout
        if training.state is TrainerState.FAILED:
            return f"the trainer failed: {training.detail}; mend that, {RESUME}"
        if rollout.given_up:
            return f"{rollout.given_up}; mend that, {RESUME}"
        if rollout.broken:
            return rollout.broken
        all_failed = self._parts.servers.all_failed
        return f"no server is left: {all_failed}; mend one, {RESUME}" if all_failed else ""

    def wind_down(self, outcome: str, error: str, *, now: Seconds) -> list[Result]:
        """Begin nothing new from now on; what is under way may end."""
        parts = self._parts
        for part in (parts.controller, parts.reconciler, parts.training):
            part.wind_down()
        self._drains_since = now
        parts.run.enter(Phase.DRAINING)
        parts.run.outcome, parts.run.error = outcome, error
        return [Wake(TimerKey(TimerOwner.COURSE).name, DRAIN_S)]

    def drain_over(self, *, now: Seconds) -> Iterator[Result]:
        """End the turns under way, and stop; a step or a checkpoint
        has as long as ``patience_s`` to end.
        """
        training, waited_s = self._parts.training, now - self._drains_since
        if training.at_work and waited_s < training.patience_s:
            yield from self._parts.rollout.abandon(now=now)
            yield Wake(TimerKey(TimerOwner.COURSE).name, DRAIN_S)
            return
        if training.at_work:
            self._fail(f"{training.work} did not end within {waited_s:.0f} s", RESUME)
        self._tell_unsaved()
        yield from self._stop_all(now)

    def end(self, *, now: Seconds) -> Iterator[Result]:
        """Bring a run that is being wound down as near to its end as it can be now."""
        run = self._parts.run
        if run.phase is Phase.DRAINING:
            yield from self._parts.training.save(now=now)
            if self._drained:
                self._tell_unsaved()
                yield from self._stop_all(now)
        if run.phase is Phase.STOPPING and self._all_gone:
            run.enter(Phase.ENDED)
            run.ended_at = now

    def _tell_unsaved(self) -> None:
        """A run whose last checkpoint could not be written has failed, and says so."""
        training = self._parts.training
        if training.checkpoints.given_up(training.step):
            self._fail(training.checkpoints.unsaved, "mend the cause", RESUME)

    def _fail(self, *why: str) -> None:
        """Mark a run that was ending anyway as failed, and add the reasons to its error."""
        run = self._parts.run
        said = [run.error] if run.error else []
        run.outcome, run.error = "failed", "; ".join([*said, *why])

    @property
    def _drained(self) -> bool:
        parts = self._parts
        generating = any(a.stage is Stage.GENERATING for a in parts.rollout.active.values())
        return not (generating or parts.training.at_work or parts.servers.syncing)

    def _stop_all(self, now: Seconds) -> Iterator[Result]:
        parts = self._parts
        parts.run.enter(Phase.STOPPING)
        why = f"the run {parts.run.outcome}"
        yield from parts.rollout.abandon(now=now)
        yield from parts.reconciler.end(why, now=now)
        yield from parts.servers.stop(why, now=now)
        yield from parts.workers.stop(why, now=now)
        yield from parts.models.stop(why, now=now)
        yield from parts.training.stop(why, now=now)

    @property
    def _all_gone(self) -> bool:
        parts = self._parts
        down = parts.training.state in (TrainerState.DOWN, TrainerState.FAILED)
        others = (parts.servers, parts.workers, parts.models)
        return down and all(one.stopped for one in others)
