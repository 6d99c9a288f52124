"""What a check finds: on which host, what, why it matters, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["stops", "warns", "fine"]
Place: TypeAlias = Literal["host", "here", "recipe", "person"]
"""Where the mending is done: on the host, on the controller, in the recipe, or by asking somebody
(root or the owner of a process)."""
Fix: TypeAlias = Literal["environment", "model", "remains"]
"""What ``--fix`` can do without root: make the Python environment, copy the model, remove what dead
runs have left in the directory of weight versions."""

ALL = "all hosts"
CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Remedy:
    """What mends a finding: a command, or the key of the recipe to change."""

    place: Place
    command: str
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found on one host, or between hosts."""

    check: str
    host: str
    severity: Severity
    what: str
    why: str = ""
    remedy: Remedy | None = None

    @property
    def line(self) -> str:
        """The host and what was found, on one line."""
        return f"{self.host}: {self.what}"


def stopping(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that forbid to start."""
    return [one for one in findings if one.severity == "stops"]


def warning(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with which a run may start."""
    return [one for one in findings if one.severity == "warns"]
