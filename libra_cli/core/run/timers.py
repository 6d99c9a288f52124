"""Finds the part that set a timer which has fired, and lets it act."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from libra_cli.core.actions import Wake
from libra_cli.core.cluster import replica_set, trainer_life
from libra_cli.core.events import NodeGone, TimerFired
from libra_cli.core.notices import Result
from libra_cli.core.reconcile import migration, reconciler
from libra_cli.core.run import course, evaluating
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.course import RunCourse
from libra_cli.core.run.state import Phase
from libra_cli.core.types import Seconds

GONE = "gone "


class Timers:
    """Finds, by the name of a timer that fired, what it was set for, or that this is over."""

    events: ClassVar[Any] = TimerFired | NodeGone
    actions: ClassVar[Any] = Wake

    def __init__(self, parts: RunParts, course: RunCourse) -> None:
        self._parts = parts
        self._course = course

    def handle(self, event: TimerFired | NodeGone, *, now: Seconds) -> Iterable[Result]:
        """A timer has fired, or one is set for a node to be back."""
        if isinstance(event, NodeGone):
            return [Wake(f"{GONE}{event.node}", replica_set.GONE_S)]
        name = event.name
        if name.startswith(reconciler.TIMER):
            return self._parts.reconciler.overdue(name, now=now)
        if name == course.TIMER and self._parts.run.phase is Phase.DRAINING:
            return self._course.drain_over(now=now)
        return self._due(name, now) if self._parts.run.going else ()

    def wants(self, action: Wake) -> bool:
        """Whether the end of the action is still waited for: always."""
        return True

    def _due(self, name: str, now: Seconds) -> Iterable[Result]:
        """Return what a timer calls for, in a run that goes on."""
        parts = self._parts
        if name == trainer_life.TIMER:
            return parts.training.restart(now=now)
        if name == evaluating.TIMER:
            return evaluating.stalled(parts, now=now)
        if name.startswith(replica_set.TIMER):
            return self._rested(name, now)
        if name.startswith(GONE):
            return self._node_overdue(name.removeprefix(GONE), now)
        if name.startswith(migration.TIMER):
            return parts.reconciler.deadline(name, now=now)
        return parts.rollout.timer_fired(name)

    def _rested(self, timer: str, now: Seconds) -> Iterator[Result]:
        restarts = self._parts.reconciler.should_restart
        yield from self._parts.servers.rested(timer, restarts, now=now)
        yield from self._parts.workers.rested(timer, restarts, now=now)
        yield from self._parts.models.rested(timer, restarts, now=now)

    def _node_overdue(self, node: str, now: Seconds) -> Iterator[Result]:
        self._parts.servers.node_overdue(node, now=now)
        yield from self._parts.training.life.node_overdue(node, now=now)
