"""Reading what another process, host or file says: nonsense becomes an error of who said it.

An answer may be of any shape: keys missing, a list for a number, text for a list, numbers out of
range, thousands of brackets. Whatever reading it raises is the answer's fault, and is raised as the
``LibraError`` that the owner of the answer is expected to raise.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from math import isfinite
from types import UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from libra_cli.config.errors import NONSENSE, LibraError
from libra_cli.runtime.supervision.failures import words_of

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def understood(kind: type[LibraError], what: str) -> Iterator[None]:
    """Raise ``kind`` if what is read within cannot be understood; ``what`` names it."""
    try:
        yield
    except NONSENSE as error:
        raise kind(f"{what} cannot be understood: {words_of(error)}") from error


def reads_answers(
    kind: type[LibraError],
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorate a coroutine function that reads an answer, which raises ``kind`` for nonsense."""

    def decorate(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(method)
        async def read(*arguments: P.args, **named: P.kwargs) -> T:
            with understood(kind, f"the answer to {method.__name__}"):
                return await method(*arguments, **named)

        return read

    return decorate


def built(kind: type[T], found: object) -> T:
    """A dataclass of plain fields from the named values of an answer; others are left out.

    Raises:
        TypeError: it is no mapping, lacks a field, or has one of another type.
        ValueError: a number is not finite.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"{type(found).__name__} where named values were expected")
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    return kind(**{name: _as(hints[name], found[name], name) for name in names if name in found})


def _as(hint: Any, value: Any, name: str) -> Any:
    """Return the value as a field's type ``hint`` has it; raises TypeError if it is of another."""
    options, (first, *_) = get_args(hint), (*get_args(hint), None)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_as(first, one, name) for one in value)
    if get_origin(hint) is Mapping and isinstance(value, Mapping):
        return {_as(first, key, name): _as(options[1], one, name) for key, one in value.items()}
    if hint is float and not isinstance(value, str):
        return finite(value)
    allowed = options if isinstance(hint, UnionType) else (hint,)
    if type(value) in allowed:
        return value
    raise TypeError(f"{name} is {type(value).__name__}, not {getattr(hint, '__name__', hint)}")


def finite(value: object) -> float:
    """A number that is neither infinite nor NaN.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} where a number was expected")
    if not isfinite(value):
        raise ValueError(f"{value} where a finite number was expected")
    return float(value)


def numbers_by_name(found: object) -> dict[str, float | None]:
    """Named numbers; one that is not finite, and None, become None.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"{type(found).__name__} where named numbers were expected")
    return {_text(name): _number_or_none(value) for name, value in found.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a name was expected")
    return value


def _number_or_none(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} where a number was expected")
    return float(value) if isfinite(value) else None
