"""Keys that mean something only beside a value of another key: each says so where it is defined.

A field is marked with ``Annotated[..., only_with("rule", "late")]`` or ``not_with``. The rule, the
JSON Schema and ``libra explain`` all read the mark. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from pydantic import BaseModel

from libra_cli.config.problems import Problem


@dataclass(frozen=True, slots=True)
class Condition:
    """The value of another key without which the marked key means nothing."""

    key: str
    """A key of the same section, or, with a dot in it, a path from the top of the recipe."""
    value: object
    """The other key's value; None stands for any value that is set."""
    holds_with: bool
    """Whether the other key must have that value, or must not have it."""
    why: str

    @property
    def words(self) -> str:
        """The words that are shown beside the key."""
        return f"{'only' if self.holds_with else 'not'} with {_pair(self.key, self.value)}"

    def holds(self, actual: object) -> bool:
        """Whether the other key is as the marked one needs it."""
        has_value = bool(actual) if self.value is None else actual == self.value
        return has_value == self.holds_with


def only_with(key: str, value: object = None, *, why: str = "") -> Condition:
    """Mark a key that means nothing unless ``key`` has this value, or any."""
    return Condition(key, value, True, why or f"only {_pair(key, value)} takes it")


def not_with(key: str, value: object, *, why: str) -> Condition:
    """Mark a key that means nothing where ``key`` has this value."""
    return Condition(key, value, False, why)


def condition_of(section: type[BaseModel], name: str) -> Condition | None:
    """The mark of a key of a section, if it has one."""
    metadata = section.model_fields[name].metadata
    return next((one for one in metadata if isinstance(one, Condition)), None)


def misplaced_keys(section: BaseModel, path: str, recipe: BaseModel) -> Iterator[Problem]:
    """Yield the keys of a section that are given and mean nothing beside the others."""
    for name, field in type(section).model_fields.items():
        condition = condition_of(type(section), name)
        given = getattr(section, name)
        if condition is None or given == field.get_default(call_default_factory=True):
            continue
        is_path = "." in condition.key
        actual: object = reduce(getattr, condition.key.split("."), recipe if is_path else section)
        if not condition.holds(actual):
            other = condition.key if is_path else f"{path}.{condition.key}"
            yield Problem(
                (f"{path}.{name}", other),
                f"is {_shown(given)}, but {other} is {_shown(actual)}: {condition.why}",
            )


def _pair(key: str, value: object) -> str:
    if value is None:
        return key
    return f"{key}: {value if isinstance(value, str) else _shown(value)}"


def _shown(value: object) -> str:
    """A value as a recipe has it; of what holds several only that it is there."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"{value:g}"
        case str():
            return repr(value)
        case _:
            return "given"
