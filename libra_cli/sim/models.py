"""The servers of frozen models in virtual time, and what trajectories ask of them.

A server answers one request after the other, each in the seconds that ``asks`` tells; requests wait
in one line for each model, and whichever server is free takes the next. So n servers answer n times
as many, which is what the planner's prices say of servers that have no time left; how vLLM batches
is not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.model_use import ModelUse
from libra_cli.core.types import Seconds, SlotId
from libra_cli.sim.virtual_time import VirtualTime


@dataclass(slots=True)
class _Asked:
    """What a trajectory has asked at its end: the event that follows the last of ``left``
    answers."""

    event: e.Event
    left: int


@dataclass(slots=True, eq=False)
class _ModelServer:
    model: str
    serves: bool = True
    free_at: Seconds = 0.0
    """When it has answered what it has."""


class _Counted:
    """A number, integrated over time."""

    def __init__(self) -> None:
        self.number, self._at, self._sum = 0, 0.0, 0.0

    def change(self, by: int, now: Seconds) -> None:
        """Count ``by`` more from ``now`` on."""
        self._sum, self._at = self.until(now), now
        self.number += by

    def until(self, now: Seconds) -> float:
        """The sum over all seconds until ``now``."""
        return self._sum + self.number * (now - self._at)


@dataclass(slots=True)
class _Line:
    """The requests of one model that wait for a server."""

    waiting: deque[_Asked] = field(default_factory=deque)
    busy: _Counted = field(default_factory=_Counted)
    """How many servers answer."""
    opened: _Counted = field(default_factory=_Counted)
    """How many requests have no answer yet."""
    answered: int = 0


class SimModels:
    """The servers of every frozen model: those of its own slots, and those of the plan."""

    def __init__(
        self,
        time: VirtualTime,
        models: Sequence[FrozenModelSpec],
        asks: Mapping[str, Seconds],
        start_s: Seconds,
    ) -> None:
        """``asks`` are the seconds of a server that a trajectory asks of a model at its end;
        ``start_s`` is how long a server takes to serve."""
        self._time = time
        self._asks = asks
        self._start_s = start_s
        own = [(f"{one.name} {n}", one.name) for one in models for n in range(one.slots)]
        self._servers: dict[SlotId, _ModelServer] = {slot: _ModelServer(name) for slot, name in own}
        self._lines = {one.name: _Line() for one in models}

    def perform(self, action: a.ModelAction) -> None:
        """Start or stop a server; its event follows in virtual time."""
        now = self._time.now
        match action:
            case a.StartModel(slot, incarnation, model):
                server = self._servers[slot] = _ModelServer(model, serves=False)
                self._time.later(e.ModelStarted(slot, incarnation), self._start_s)
                self._time.at(now + self._start_s, partial(self._started, server))
            case a.StopModel(slot, incarnation):
                server = self._servers.pop(slot)
                server.serves = False
                answered_s = max(0.0, server.free_at - now)
                self._time.later(e.ModelStopped(slot, incarnation), answered_s)
            case _:
                assert_never(action)

    def ask(self, event: e.Event, after_s: Seconds) -> None:
        """Have a trajectory that ends in ``after_s`` seconds ask every model; ``event`` follows
        the last answer."""
        if not self._asks:
            self._time.later(event, after_s)
            return
        asked = _Asked(event, len(self._asks))
        self._time.at(self._time.now + after_s, partial(self._asked, asked))

    def _asked(self, asked: _Asked) -> None:
        for name in self._asks:
            line = self._lines[name]
            line.waiting.append(asked)
            line.opened.change(+1, self._time.now)
            self._take_next(name)

    def _started(self, server: _ModelServer) -> None:
        if server in self._servers.values():  # it may have been stopped meanwhile
            server.serves = True
            self._take_next(server.model)

    def _take_next(self, name: str) -> None:
        """Let servers of a model that are free take requests that wait."""
        line, now = self._lines[name], self._time.now
        for server in self._servers.values():
            if server.model == name and server.serves and server.free_at <= now and line.waiting:
                server.free_at = now + self._asks[name]
                line.busy.change(+1, now)
                answered = partial(self._answered, name, line.waiting.popleft())
                self._time.at(server.free_at, answered)

    def _answered(self, name: str, asked: _Asked) -> None:
        line = self._lines[name]
        line.busy.change(-1, self._time.now)
        line.opened.change(-1, self._time.now)
        line.answered += 1
        asked.left -= 1
        self._time.later(e.ModelsUsed(self.uses), 0.0)
        if not asked.left:
            self._time.later(asked.event, 0.0)
        self._take_next(name)

    @property
    def uses(self) -> tuple[ModelUse, ...]:
        """What has been asked of each model until now."""
        now = self._time.now
        serving = [one.model for one in self._servers.values() if one.serves]
        return tuple(
            ModelUse(
                name,
                serving.count(name),
                line.busy.until(now),
                line.opened.until(now),
                line.opened.number,
                line.answered,
            )
            for name, line in self._lines.items()
        )
