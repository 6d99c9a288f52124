"""A row of a table of another trainer's keys: which of libra's keys they are, with which value.

A ``KeyRule`` reads the settings that it is about (``Given``) and yields a ``Setting`` of a recipe
or a ``LeftOut`` with its reason. Most rules are about one key and are made by ``same``, ``turned``
and ``left``; those whose value depends on several keys, as batch sizes do, are made by ``joint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class Why(StrEnum):
    """Why a key of another trainer has no key of a recipe."""

    NOT_NEEDED = "not needed here"
    MISSING = "does not exist here"
    PLANNED = "chosen by the planner"
    BRING = "to be brought"
    COMPUTED = "computed by the script"


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of a recipe with its value; ``told`` says beside it where the value is from."""

    key: str
    value: Any
    told: str = ""
    instead: tuple[str, ...] = ()
    """Lines of YAML that may stand in place of the key, once they are filled in."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key of theirs that the recipe says nothing of, and the reason in words."""

    key: str
    why: Why
    reason: str
    value: Any = None
    """The value of the key, where the reason does not name it."""


Made: TypeAlias = Iterator[Setting | LeftOut]


class Refused(ValueError):
    """A value that libra has no counterpart of; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Given:
    """The settings of one configuration, by their keys, and what counts where it says nothing."""

    trainer: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return a value, or the trainer's default, or ``otherwise``."""
        if key in self:
            return self.values[key]
        return self.defaults.get(key, otherwise)

    def number(self, key: str, otherwise: float = 0) -> Any:
        """Return a number; 0 and below are values too.

        Raises:
            Refused: the value is no number.
        """
        value = self.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"is {value!r}, which is no number")
        return value

    def told(self, *keys: str) -> str:
        """Say where a value is from: their keys as given, or whose default it is."""
        given = [key for key in keys if key in self]
        if not given:
            return f"{self.trainer}'s default of {keys[0].rpartition('.')[2]}"
        return ", ".join(f"{key.rpartition('.')[2]}: {shown(self.values[key])}" for key in given)


Make: TypeAlias = Callable[[Given], Made]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """A row of a table: their keys, libra's, the way from one to the other in words, and in code.

    A rule is followed where one of its keys is given, and one of ``always`` in any case. With a
    ``why`` nothing is made of its keys, nor of those inside of a section that it names.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    how: str
    """How a value carries over; with ``why``, the reason for which none does."""
    make: Make = lambda given: iter(())
    always: bool = False
    why: Why | None = None
    idle: tuple[Any, ...] = ()
    """Values with which a key changes nothing, so that leaving it out need not be told."""


@dataclass(frozen=True, slots=True)
class Table:
    """What one trainer calls things."""

    trainer: str
    rules: tuple[KeyRule, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values where a configuration says nothing, of keys for which libra takes others."""

    def theirs(self) -> set[str]:
        """Return all keys, and sections of keys, that a rule is about."""
        return {key for rule in self.rules for key in rule.theirs}

    def rule_of(self, key: str) -> KeyRule | None:
        """Return the rule that is about a key, or about the nearest section around it."""
        exact = key
        while key:
            for rule in self.rules:
                if key in rule.theirs and (key == exact or rule.why is not None):
                    return rule
            key = key.rpartition(".")[0]
        return None


def joint(theirs: str, ours: str, how: str, make: Make, *, always: bool = True) -> KeyRule:
    """Return a rule about several keys; ``theirs`` and ``ours`` are separated by blanks."""
    return KeyRule(tuple(theirs.split()), tuple(ours.split()), how, make, always)


def turned(
    theirs: str, ours: str, how: str, value_of: Callable[[Any], Any], *, always: bool = False
) -> KeyRule:
    """Return a rule about one key, whose value ``value_of`` turns into libra's, None into nothing.

    ``value_of`` raises ``Refused`` for a value without a counterpart.
    """

    def make(given: Given) -> Made:
        value = given.get(theirs)
        if value is None:
            return
        made = value_of(value)
        if made is not None:
            yield Setting(ours, made, given.told(theirs))

    return KeyRule((theirs,), (ours,), how, make, always)


def same(theirs: str, ours: str, *, always: bool = False) -> KeyRule:
    """Return a rule about one key whose values mean the same in libra."""
    return turned(theirs, ours, "the same", lambda value: value, always=always)


def left(theirs: str, why: Why, reason: str, *, idle: tuple[Any, ...] = ()) -> KeyRule:
    """Return a rule about keys, or sections of keys, that a recipe has nothing for.

    A value that is off, or one of ``idle``, changes nothing.
    """
    off = (None, False, "", "none", *idle)
    return KeyRule(tuple(theirs.split()), (), reason, why=why, idle=off)


def one_of(choices: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """Return a function from their words to libra's.

    Raises:
        Refused: by the function, which calls other words no ``what`` of libra's.
    """

    def value_of(value: Any) -> Any:
        if value not in choices:
            raise Refused(f"is {shown(value)}, and libra has no such {what}")
        return choices[value]

    return value_of


def whole(value: float, what: str) -> int:
    """Return a number of things as an integer.

    Raises:
        Refused: it is none, or less than one.
    """
    if value < 1 or value != int(value):
        raise Refused(f"{what} would be {value:g}, which must be a whole number")
    return int(value)


def shown(value: Any) -> str:
    """Write a value for a person, cut to 40 characters."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
