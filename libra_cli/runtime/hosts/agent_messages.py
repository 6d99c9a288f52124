"""The agent's answers, and the events that report changes of a host or its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process that was started. ``started`` is its start time in clock ticks since boot."""

    pid: int
    started: int
    log: str


@dataclass(frozen=True, slots=True)
class StoppedProcess:
    """The pids that had to be killed, and descriptions of the processes that are still there."""

    killed: tuple[int, ...]
    leftovers: tuple[str, ...]

    @property
    def stopped(self) -> bool:
        """Whether no process is left."""
        return not self.leftovers


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process that the agent runs or has run."""

    process: str
    pid: int
    started: int
    state: str
    """``running | exited``"""
    exit_code: int | None
    log: str
    tail: str
    """The end of its log, once it has exited."""
    requested: bool
    """Whether the agent was asked to stop it."""
    moved_ports: Mapping[str, int] = field(default_factory=dict)
    """``Exited.moved_ports``, by the port in decimal digits, since JSON has no other keys."""


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """A weight version that an agent now has on its host, and what the transfer took."""

    path: str
    kind: str
    """``full | delta | fabric``, or ``local`` if it was there before."""
    sent_by: Mapping[str, int]
    """Bytes that came over the network for it, by source."""
    seconds: float
    detail: str
    """Why the fabric, or a delta that was offered, could not be used; empty otherwise."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that came over the network for the version."""
        return sum(self.sent_by.values())


@dataclass(frozen=True, slots=True)
class Seat:
    """A host's place in a process group that a version travels by."""

    group: str
    """A name that no other group has."""
    addresses: tuple[str, ...]
    """Where the ranks listen, in their order, as gloo tells it, in base64."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has ended and nothing of it is left, orphans included.

    ``exit_code`` is negative for a signal, and None if its agent had died before it.
    """

    node: str
    process: str
    pid: int
    exit_code: int | None
    tail: str
    requested: bool
    moved_ports: Mapping[int, int] = field(default_factory=dict)
    """For each of its ports that somebody else has taken meanwhile, the port for its next start."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection broke. Processes go on there; requests wait."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection is there again after so many seconds, and so are the processes."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The lease is over: the host is given up, since its agent stops everything, or its guard."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A host that was given up has a new agent, after so many seconds, and nothing runs there."""

    node: str
    seconds: float


HostEvent: TypeAlias = Exited | ConnectionLost | Reconnected | LeaseExpired | Rejoined
