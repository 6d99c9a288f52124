"""Broken rules of a recipe, as the models report them and as ``runtime.recipes`` locates them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule. ``keys`` are the fields that it is about, the one to change first."""

    keys: tuple[str, ...]
    reason: str

    def inside(self, section: str) -> Problem:
        """The same problem with the keys of a section named from the top, by the section's path."""
        return Problem(tuple(f"{section}.{key}".strip(".") for key in self.keys), self.reason)


class RuleError(ValueError):
    """Rules between fields are broken; it holds all of them."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(f"{problem.keys[0]}: {problem.reason}" for problem in problems))
        self.problems = problems
