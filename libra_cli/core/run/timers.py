"""Lets the part act that set a timer which has fired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from libra_cli.core.actions import Wake
from libra_cli.core.cluster.replica_set import GONE_S
from libra_cli.core.events import NodeGone, TimerFired
from libra_cli.core.notices import Result
from libra_cli.core.run import evaluating
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.course import RunCourse
from libra_cli.core.run.state import Phase
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Seconds


class Timers:
    """Finds, by the key of a timer that fired, what it was set for, or that this is over."""

    events: ClassVar[Any] = TimerFired | NodeGone
    actions: ClassVar[Any] = Wake

    def __init__(self, parts: RunParts, course: RunCourse) -> None:
        self._parts = parts
        self._course = course

    def handle(self, event: TimerFired | NodeGone, *, now: Seconds) -> Iterable[Result]:
        """A timer has fired, or one is set for a node to be back."""
        if isinstance(event, NodeGone):
            return [Wake(TimerKey(TimerOwner.NODE, (event.node,)).name, GONE_S)]
        timer = TimerKey.named(event.name)
        if timer.owner is TimerOwner.DRAIN:
            return self._parts.reconciler.overdue(timer, now=now)
        if timer.owner is TimerOwner.COURSE and self._parts.run.phase is Phase.DRAINING:
            return self._course.drain_over(now=now)
        return self._due(timer, now) if self._parts.run.going else ()

    def wants(self, action: Wake) -> bool:
        """Whether the end of the action is still waited for: always."""
        return True

    def _due(self, timer: TimerKey, now: Seconds) -> Iterable[Result]:
        """Return what a timer calls for, in a run that goes on."""
        parts = self._parts
        if timer.owner is TimerOwner.TRAINER:
            return parts.training.restart(now=now)
        if timer.owner is TimerOwner.EVALUATING:
            return evaluating.stalled(parts, now=now)
        if timer.owner is TimerOwner.REPLICA:
            return self._rested(timer, now)
        if timer.owner is TimerOwner.NODE:
            return self._node_overdue(timer.about[0], now)
        if timer.owner is TimerOwner.MOVE:
            return parts.reconciler.deadline(timer, now=now)
        return parts.rollout.ask_again() if timer.owner is TimerOwner.TEACHING else ()

    def _rested(self, timer: TimerKey, now: Seconds) -> Iterator[Result]:
        restarts = self._parts.reconciler.should_restart
        yield from self._parts.servers.rested(timer, restarts, now=now)
        yield from self._parts.workers.rested(timer, restarts, now=now)
        yield from self._parts.models.rested(timer, restarts, now=now)

    def _node_overdue(self, node: str, now: Seconds) -> Iterator[Result]:
        self._parts.servers.node_overdue(node, now=now)
        yield from self._parts.training.life.node_overdue(node, now=now)
