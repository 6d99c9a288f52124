"""What a check finds: on which host, what, why it matters, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["stops", "warns", "fine", "unknown"]
"""How bad a finding is; ``unknown`` is fine as far as was looked, which some host did not let."""
Place: TypeAlias = Literal["host", "here", "recipe", "person"]
"""Where a remedy is carried out: on the host, on the controller, in the recipe, or by asking
somebody (root or the owner of a process).
"""
Fix: TypeAlias = Literal["environment", "model", "remains"]
"""Remedies that ``--fix`` carries out without root: make the Python environment, copy the model,
remove what dead runs have left in the directory of weight versions.
"""

ALL = "all hosts"
CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A command that mends a finding, or the key of the recipe to change."""

    place: Place
    command: str
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check on one host, or between hosts."""

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
    """Return the findings that forbid to start a run."""
    return [one for one in findings if one.severity == "stops"]


def warning(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with which a run may start, but that are worth a warning."""
    return [one for one in findings if one.severity == "warns"]
