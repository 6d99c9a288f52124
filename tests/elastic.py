"""A world in which only what a test orders moves, and chosen answers are held back."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from json import loads
from random import Random
from typing import Any, TypeVar

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.reconcile.migration import SlotMigration
from libra_cli.core.records import MoveRecord
from libra_cli.core.types import Plan, Role, SlotId
from tests.world import World, recipe

T = TypeVar("T")


@dataclass
class Scene(World):
    """The core is on c/0 and a/0; a/1, b/0 and b/1 serve."""

    log: list[a.Action] = field(default_factory=list)
    silent: Callable[[e.Event], bool] = lambda event: False
    """Which answers do not come until ``speak``."""
    kept: list[e.Event] = field(default_factory=list)

    def _perform(self, action: a.Action) -> None:
        self.log.append(action)
        super()._perform(action)

    def later(self, event: e.Event, least: float = 0.01, most: float = 1.0) -> None:
        """Unless the test holds such events back."""
        if self.silent(event):
            self.kept.append(event)
        else:
            super().later(event, least, most)

    def speak(self) -> None:
        """What was held back happens now."""
        self.silent = lambda event: False
        kept, self.kept = self.kept, []
        for event in kept:
            self.give(event)

    def idle(self, seconds: float) -> None:
        """Time passes in which nothing happens."""
        self.now += seconds
        self._heap = [(at + seconds, order, event) for at, order, event in self._heap]

    def until(self, condition: Callable[[], object], most: int = 20_000) -> None:
        """Let time pass until something is so."""
        for _ in range(most):
            if condition():
                return
            assert self._heap, "nothing will ever happen again"
            self.now, _, event = heapq.heappop(self._heap)
            self.give(event)
        raise AssertionError("it never came to that")

    def steps_on(self, number: int = 2) -> None:
        """So many steps more are done."""
        step = self.machine.training.step
        self.until(lambda: self.machine.training.step >= step + number)

    def order(self, *pins: tuple[SlotId, Role | None], **to: int) -> a.AnswerOrder:
        """Give an order; what is answered, or the newest answer if the planner is asked first."""
        wanted = tuple((Role(role), number) for role, number in to.items())
        self.give(e.PlanOrdered(f"order-{len(self.answers)}", wanted, pins))
        return self.answers[-1]

    def choose(self, plan: Plan) -> None:
        """The planner chooses a plan."""
        self.give(e.PlanChosen(plan, self._slots))

    def move(self, slot: SlotId) -> SlotMigration:
        """The one under way there."""
        return self.machine.reconciler.moves[slot]

    def time_is_up(self, slot: SlotId) -> None:
        """The phase that the slot's move is in has taken as long as it may."""
        self.give(e.TimerFired(self.move(slot).timer.name))

    def arrive(self) -> None:
        """Every move under way ends."""
        self.until(lambda: not self.machine.reconciler.moves)

    def state(self, slot: SlotId) -> tuple[ReplicaState | None, ReplicaState | None]:
        """Of the server and of the worker there."""
        server = self.machine.servers.replicas.get(slot)
        worker = self.machine.workers.replicas.get(slot)
        return server.state if server else None, worker.state if worker else None

    def did(self, kind: type[T]) -> list[T]:
        """The actions of one kind so far."""
        return [action for action in self.log if isinstance(action, kind)]

    def moved(self, slot: SlotId) -> MoveRecord:
        """The newest move of a slot."""
        rows: list[MoveRecord] = self.rows(MoveRecord)
        return [row for row in rows if row.slot == slot][-1]

    def phases(self, slot: SlotId) -> list[str]:
        """Of its newest move."""
        return [phase for phase, _, _ in loads(self.moved(slot).phases_json)]


def scene(
    *,
    gpus: bool = True,
    steps: int = 1000,
    kind: str = "fixed",
    sleep: bool = False,
    make: type[Scene] = Scene,
    **training: Any,
) -> Scene:
    """All three servers serve, and the first step is done."""
    hosts = [
        {"host": host, "slots": 2, "pool": "hybrid", **({"gpus": 2} if gpus else {})}
        for host in "ab"
    ]
    head = {"host": "c", "pool": "train", **({"gpus": 1} if gpus else {})}
    world = make(
        Random(0),
        recipe=recipe(
            run={"name": "world", "steps": steps},
            nodes=[head, *hosts],
            training={"groups_per_step": 3, "max_staleness": 1, "checkpoint_every": 50, **training},
            rollout={"sleep": sleep},
            planner={"kind": kind},
        ),
    )
    world.later(e.RunStarted())
    serving = [ReplicaState.SERVING] * 3
    servers = world.machine.servers
    world.until(lambda: [status.state for status in servers.replicas.values()] == serving)
    world.steps_on(1)
    return world


def of(kind: type[e.Event] | tuple[type[e.Event], ...], slot: SlotId = "") -> Callable[..., bool]:
    """Events of a kind, about a slot if one is named."""
    return lambda event: isinstance(event, kind) and slot in ("", getattr(event, "slot", ""))
