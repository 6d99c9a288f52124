"""What a sandbox is made of, and how much it may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Backend = Literal["bubblewrap", "none"]

WORK = "/work"
"""Where commands begin, and their HOME."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The most that a sandbox may use; each keeps one model's idea from being everyone's problem.

    Of ``none``, which has no file system of its own, ``disk_mb`` bounds single files alone.
    """

    time_s: float = 8.0
    """Seconds of a command, unless its caller says otherwise."""
    cpu_s: int = 60
    """Seconds of CPU that a process may use."""
    memory_mb: int = 2048
    """MiB of address space of a process."""
    processes: int = 256
    """Processes and threads at the same time."""
    disk_mb: int = 512
    """MiB of all files that are written, which lie in memory."""
    output_bytes: int = 65_536
    """Bytes that are kept of what a command writes to stdout, and to stderr: the first half of
    them and the last."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """One sandbox: what it sees of the host, and its limits."""

    backend: Backend = "bubblewrap"
    """``none`` runs commands on the host as whoever runs this process: only for code you trust."""
    root: str | None = None
    """A directory that the sandbox begins as a copy of. None: the host's own programs and
    libraries, read only."""
    network: bool = False
    """Whether it is in the host's network."""
    readable: tuple[str, ...] = ()
    """Absolute paths of the host that are seen at the same place, read only."""
    user: int = 1000
    """The uid and gid that processes have within; 0 is no more powerful."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def as_json(self) -> dict[str, Any]:
        """Return a mapping that JSON can carry."""
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> SandboxSpec:
        """Return the spec that ``as_json`` told of; missing keys have their defaults."""
        limits = SandboxLimits(**(told.get("limits") or {}))
        rest = {key: value for key, value in told.items() if key not in ("limits", "readable")}
        return cls(**rest, readable=tuple(told.get("readable") or ()), limits=limits)
