"""What all processes of a sandbox use together, which no limit of a process bounds."""

from __future__ import annotations

import contextlib
import os

from libra_cli.envs.sandbox.spec import SandboxLimits

_OWN = 2
"""Processes of every sandbox: bubblewrap's, and the one that keeps it."""
_NEARLY = 0.9
"""The share of the allowed processes from which on they are too many, if they stay as many: what
has reached the limit does not go on as it was meant to."""
_LOOKS = 2
_MIB = 1 << 20


class Watch:
    """Looks at a sandbox now and then, from without."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._crowded = 0
        self.busy = False
        """Whether the last look found a process that is not of every sandbox."""

    def objection(self, directory: str) -> str:
        """Look at a /proc, and say what is too much; empty if nothing is."""
        found = _pages_of_each(directory)
        self.busy = len(found) > _OWN
        crowded = len(found) - _OWN >= _NEARLY * self._limits.processes
        self._crowded = self._crowded + 1 if crowded else 0
        if self._crowded >= _LOOKS:
            self._crowded = 0
            return f"there were {len(found)} at once, of at most {self._limits.processes}"
        used = sum(found) * os.sysconf("SC_PAGE_SIZE") // _MIB
        if used > self._limits.memory_mb:
            return f"they had {used:,} MiB together, of at most {self._limits.memory_mb:,}"
        return ""


def _pages_of_each(directory: str) -> list[int]:
    """Pages of memory that each process has for itself; none if the sandbox has ended."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"{directory}/{name}/statm", "rb") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
                    found.append(resident - shared)
    return found
