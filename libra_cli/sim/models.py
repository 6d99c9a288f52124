"""The servers of frozen models in virtual time, and what trajectories ask of them.

Whoever is asked answers one request after the other, each in the seconds of one server that
``asks`` tells, and a request goes to the server that is free first. So n servers answer n times as
many, which is what the planner's prices say of servers that have no time left; how vLLM batches is
not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.model_use import ModelUse
from libra_cli.core.types import Seconds
from libra_cli.sim.virtual_time import VirtualTime


@dataclass(slots=True)
class _ModelServer:
    model: str
    serves_at: Seconds
    free_at: Seconds


class _TimeSpans:
    """Spans of time that may lie ahead, of which it is asked how much is over."""

    def __init__(self) -> None:
        self._over_s: Seconds = 0.0
        self._spans: list[tuple[Seconds, Seconds]] = []

    def add(self, begins: Seconds, ends: Seconds) -> None:
        self._spans.append((begins, ends))

    def until(self, now: Seconds) -> Seconds:
        """The seconds of all spans that are over by ``now``, which never goes back."""
        self._over_s += sum(ends - begins for begins, ends in self._spans if ends <= now)
        self._spans = [span for span in self._spans if span[1] > now]
        return self._over_s + sum(max(0.0, now - begins) for begins, _ in self._spans)


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
        self._servers = {name: _ModelServer(model, 0.0, 0.0) for name, model in own}
        names = [one.name for one in models]
        self._busy = {name: _TimeSpans() for name in names}
        self._asked = {name: _TimeSpans() for name in names}

    def perform(self, action: a.ModelAction) -> None:
        """Start or stop a server; its event follows in virtual time."""
        now = self._time.now
        match action:
            case a.StartModel(slot, incarnation, model):
                serves_at = now + self._start_s
                self._servers[slot] = _ModelServer(model, serves_at, serves_at)
                self._time.later(e.ModelStarted(slot, incarnation), self._start_s)
            case a.StopModel(slot, incarnation):
                server = self._servers.pop(slot)
                answered_s = max(0.0, server.free_at - now)
                self._time.later(e.ModelStopped(slot, incarnation), answered_s)
            case _:
                assert_never(action)

    def wait_s(self, after_s: Seconds) -> Seconds:
        """Have a trajectory that ends in ``after_s`` seconds ask every model; return how long it
        waits for the last answer."""
        asked_at = self._time.now + after_s
        done = [self._ask(name, seconds, asked_at) for name, seconds in self._asks.items()]
        if done:
            self._time.later(e.ModelsUsed(self.uses), 0.0)
        return max(done, default=asked_at) - asked_at

    def _ask(self, name: str, seconds: Seconds, at: Seconds) -> Seconds:
        serving = [one for one in self._servers.values() if one.model == name]
        first = min(serving, key=lambda one: max(one.free_at, at))
        begins = max(first.free_at, at)
        first.free_at = begins + seconds
        self._busy[name].add(begins, first.free_at)
        self._asked[name].add(at, first.free_at)
        return first.free_at

    @property
    def uses(self) -> tuple[ModelUse, ...]:
        """What has been asked of each model until now."""
        now = self._time.now
        serving = [one.model for one in self._servers.values() if one.serves_at <= now]
        return tuple(
            ModelUse(name, serving.count(name), busy.until(now), self._asked[name].until(now))
            for name, busy in self._busy.items()
        )
