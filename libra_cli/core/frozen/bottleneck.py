"""Whether a frozen model is what training waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core.observation import STARVED
from libra_cli.core.records import SlotRecord
from libra_cli.core.trajectory_time import MOST, TrajectoryTime

FULL = 0.9
"""Share of the time with a request from which on servers have no time left. Chosen."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What the servers of a frozen model have to do: ``servers`` serve now and ``most`` may,
    ``busy`` is the share of their time with a request, ``waiting`` the requests without room."""

    name: str
    servers: int
    most: int
    busy: float
    waiting: int

    def __str__(self) -> str:
        servers = f"its {self.servers} servers have" if self.servers > 1 else "its one server has"
        waiting = f", and {self.waiting} wait for room" if self.waiting else ""
        return f"{servers} requests for {self.busy:.0%} of the time{waiting}"


def model_loads(models: Sequence[FrozenModelSpec], rows: Iterable[SlotRecord]) -> list[ModelLoad]:
    """Return the load of every model, by the newest rows of its slots."""
    frozen = [row for row in rows if row.is_frozen and row.state == "serving"]
    return [_load(spec, [row for row in frozen if row.bucket == spec.name]) for spec in models]


def _load(spec: FrozenModelSpec, rows: Sequence[SlotRecord]) -> ModelLoad:
    serving_s = sum(row.serving_s for row in rows)
    busy = sum(row.busy_s for row in rows) / serving_s if serving_s else 0.0
    return ModelLoad(spec.name, len(rows), spec.most_slots, busy, sum(row.waiting for row in rows))


def model_bottleneck(
    loads: Iterable[ModelLoad], time: TrajectoryTime, *, training_idle: float | None
) -> str:
    """Say that a frozen model holds up the run, with numbers and what to do; empty if none does.

    One does where training waits (``training_idle`` is the share of its time), trajectories are in
    their environments, which ask it, for most of theirs, and its servers have no time left.
    """
    in_environment = time.share(time.waiting_s + time.environment_s)
    if not training_idle or training_idle <= STARVED or in_environment <= MOST:
        return ""
    return next(_sentences(loads, training_idle), "")


def _sentences(loads: Iterable[ModelLoad], training_idle: float) -> Iterator[str]:
    for load in sorted(loads, key=lambda one: (-one.waiting, -one.busy)):
        if load.servers and (load.waiting or load.busy > FULL):
            yield (
                f"model {load.name} is the bottleneck: {load}, and training waits for "
                f"{training_idle:.0%}; {_next(load)}"
            )


def _next(load: ModelLoad) -> str:
    if load.servers < load.most:
        return f"libra rebalance RUN_DIR --to {load.name}={load.servers + 1}"
    return "give it more slots (models[].slots or max_slots), or a smaller model"
