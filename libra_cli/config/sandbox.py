"""The section of a recipe that says what commands of an environment run in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from libra_cli.config.fields import Count, Positive, Section, one_or_several
from libra_cli.config.on_resume import MAY_CHANGE, fixed
from libra_cli.config.only_with import not_with
from libra_cli.config.problems import Problem

ROOM_S = 1.0
"""Seconds that a tool call may take beside its command."""


class SandboxLimitsSection(Section):
    """The most that a sandbox may use; what wants more fails as on a smaller machine."""

    on_resume = MAY_CHANGE

    time_s: Annotated[float, Field(gt=0.0)] = 8.0
    """Seconds of a command; less than tool_timeout_s, so that the shell is there for the next."""
    cpu_s: Positive = 60
    """Seconds of CPU of each process."""
    memory_mb: Annotated[int, Field(ge=64)] = 2048
    """MiB of address space of each process."""
    processes: Annotated[int, Field(ge=8)] = 256
    """Processes and threads at the same time."""
    disk_mb: Annotated[int, Field(ge=8)] = 512
    """MiB of all files that are written; they lie in the memory of the host."""
    output_bytes: Annotated[int, Field(ge=256)] = 65_536
    """Bytes that are kept of what a command writes: the first half of them, and the last."""


class SandboxSection(Section):
    """What commands of the environment run in: without a network, without files of the host but its
    programs, and without a view of other processes. The factory gets it as ``sandbox``."""

    on_resume = fixed("the policy was trained in it")

    backend: Annotated[Literal["bubblewrap", "none"], MAY_CHANGE] = "bubblewrap"
    """bubblewrap needs no root, and bwrap on the host. none keeps nothing in: commands run there as
    whoever runs the environment does."""
    root: Annotated[str | None, not_with("backend", "none", why="it is no other root")] = None
    """A directory of the host that a sandbox begins as a copy of, for example an unpacked image.
    Null: the host's own programs and libraries, read only."""
    network: bool = False
    """Whether commands reach the network of the host, its loopback included."""
    readable: Annotated[
        tuple[str, ...],
        one_or_several,
        not_with("backend", "none", why="everything of the host is"),
    ] = ()
    """Absolute paths of the host that are seen at the same place, read only."""
    user: Annotated[
        Count, Field(le=65533), not_with("backend", "none", why="who runs it is the user")
    ] = 1000
    """The uid that commands see as theirs; 0 may do no more than others."""
    limits: SandboxLimitsSection = SandboxLimitsSection()

    def problems(self) -> Iterator[Problem]:
        """Yield paths that no directory of a host is meant by."""
        paths = {"readable": self.readable, "root": (self.root,) if self.root else ()}
        for key, given in paths.items():
            for path in given:
                if not path.startswith("/"):
                    yield Problem((key,), f"{path!r} is no absolute path of the host")
