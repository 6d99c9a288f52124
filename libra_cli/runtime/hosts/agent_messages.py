"""What comes back from a host: the agent's answers, and the events it and its line give rise to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process with memory on a GPU. ``user`` is empty if it cannot be looked up."""

    pid: int
    user: str
    command: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes."""

    index: int
    name: str
    mem_total: int
    mem_free: int
    holders: tuple[GpuHolder, ...]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a host is; sizes in bytes, ``clock`` in seconds since the epoch."""

    python: str
    hostname: str
    user: str
    cpus: int
    mem_total: int
    mem_free: int
    disk_free: int
    shm_free: int
    gpus: tuple[Gpu, ...]
    interface: str
    """The network interface on the way to the first peer."""
    address: str
    """This host's own address on that way."""
    clock: float
    packages: tuple[str, ...]
    """Of those asked for, the ones that can be imported."""
    paths: tuple[str, ...]
    """Of those asked for, the ones that exist."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that runs. ``started`` is its start time in clock ticks since boot."""

    pid: int
    started: int
    log: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a process ended: whether all of it did, who had to be killed, and what is left."""

    killed: tuple[int, ...]
    leftovers: tuple[str, ...]

    @property
    def stopped(self) -> bool:
        """Whether, verified, nothing of it is left."""
        return not self.leftovers


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process as the agent knows it."""

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
    """Whether it was asked to stop."""


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """A weight version now on the host."""

    path: str
    source: str
    kind: str
    """``full | delta``, or ``local`` if it was there before."""
    sent_bytes: int
    """Everything that came over the network for it."""
    seconds: float
    detail: str
    """Why a delta that was offered was of no use."""


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


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is gone. Whatever runs goes on; requests wait."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Back:
    """The connection is there again, after this long, and so are the processes."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The lease is over: the host is given up, and its agent has stopped everything."""

    node: str
    reason: str


HostEvent: TypeAlias = Exited | Lost | Back | Gone
