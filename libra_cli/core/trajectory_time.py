"""Where the seconds of trajectories go, and whether environments are what training waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_cli.config.environment import AgentSpec, EnvironmentSpec
from libra_cli.core.observation import STARVED
from libra_cli.core.types import Seconds

MOST = 0.5
"""Share of a trajectory from which on its environment is the longer part. Above it, servers of any
speed shorten a trajectory by less than environments of any speed."""


@dataclass(frozen=True, slots=True)
class TrajectoryTime:
    """The seconds of one trajectory, on average over ``trajectories`` that have finished."""

    trajectories: int
    waiting_s: Seconds
    """Seconds without a place: until a call of its environment might begin, or its agent."""
    environment_s: Seconds
    """Seconds in its environment, or its agent: tasks, tools, replies and scores."""
    queue_s: Seconds
    """Seconds without a seat of a server."""
    decode_s: Seconds
    """Seconds on a server, which generates its turns."""

    @property
    def total_s(self) -> Seconds:
        """The seconds from its begin to its end, but for what nobody recorded."""
        return self.waiting_s + self.environment_s + self.queue_s + self.decode_s

    def share(self, seconds: Seconds) -> float:
        """The share of its time, 0 to 1, that so many seconds are."""
        return seconds / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class Places:
    """How many calls, processes or agents work at the same time, and the key that says so."""

    number: int
    what: str
    key: str
    on_nodes: str
    """The key that names hosts for them."""


def places_of(environments: Sequence[EnvironmentSpec], agent: AgentSpec | None) -> Places:
    """The places of the run; of several environments those of the one with the fewest."""
    if agent is not None:
        number = agent.concurrency * max(1, len(agent.nodes))
        return Places(number, "agents", "agent.concurrency", "agent.nodes")
    return min(map(_places_of, environments), key=lambda places: places.number)


def _places_of(spec: EnvironmentSpec) -> Places:
    nodes = "environment.workers.nodes"
    if spec.workers is None:
        return Places(spec.concurrency, "calls at once", "environment.concurrency", nodes)
    number = spec.workers.processes * max(1, len(spec.workers.nodes))
    return Places(number, "workers", "environment.workers.processes", nodes)


def environment_bottleneck(
    time: TrajectoryTime, *, training_idle: float | None, places: Places, full: float = 0.0
) -> str:
    """Say that environments hold up the run, with numbers and what to do; empty if they do not.

    They do where training waits (``training_idle`` is the share of its time) and trajectories are
    in their environments, or wait to be, for most of theirs; or hosts held as many as they may for
    most of the time (the share ``full``), and further ones would have begun.
    """
    apart = time.waiting_s + time.environment_s
    if not training_idle or training_idle <= STARVED:
        return ""
    if full > MOST:
        return (
            f"environments are the bottleneck: for {full:.0%} of the time their hosts held as many "
            f"episodes as they may, and training waits for {training_idle:.0%}; raise "
            f"environment.workers.episodes if their memory allows it, or {_host(places)}"
        )
    if time.share(apart) <= MOST:
        return ""
    waits, plays = time.share(time.waiting_s), time.share(time.environment_s)
    found = (
        f"environments are the bottleneck: of a trajectory's {time.total_s:,.1f} s {plays:.0%} go "
        f"to its environment and {waits:.0%} to waiting for one of {places.number:,} "
        f"{places.what}, and training waits for {training_idle:.0%} of the time"
    )
    if time.waiting_s >= time.environment_s:
        return f"{found}; raise {places.key}, or {_host(places)}"
    return (
        f"{found}; more rollout slots do not help: make their calls faster, {_host(places)} if "
        "their cores are full, or play more at once (training.max_staleness)"
    )


def _host(places: Places) -> str:
    return f"add a host with pool: environments to {places.on_nodes}"
