"""Events as bytes, so that what comes back equals what went in.

Every value is msgpack's own or an array whose first item is a tag: the name of a class of the core
(class names are unique in the package) or of a container. Which classes there are follows from the
type hints of ``Event``, so a new event or field needs nothing here, and nothing else can be made
from a file. Events have no lists, which would be taken for tagged values.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

import msgpack

from libra_cli.core.events import Event

_TUPLE, _SET, _ARRAY, _ASKED = "tuple", "frozenset", "array", "asked"
"""Tags that are no classes. No class begins with a small letter."""
_HINTS_ONLY = {"array": list}
"""``array`` takes no parameters at run time before Python 3.12."""


@cache
def event_classes() -> dict[str, type]:
    """Return every class of the core that a value in an event may have, by its name."""
    found: dict[str, type] = {}
    _collect(Event, found)
    return found


def _collect(hint: Any, found: dict[str, type]) -> None:
    for part in get_args(hint):
        _collect(part, found)
    if not isinstance(hint, type) or hint.__name__ in found:
        return
    if issubclass(hint, Enum):
        found[hint.__name__] = hint
    elif dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        found[hint.__name__] = hint
        for part in get_type_hints(hint, localns=_HINTS_ONLY).values():
            _collect(part, found)


def encode(event: Event | None, asked: object = None) -> Any:
    """An event as values for ``pack``; arrays that the action ``asked`` brought stay with it."""
    if event is None:
        return None
    fields: list[Any] = [type(event).__name__]
    for name in event.__dataclass_fields__:
        value = getattr(event, name)
        with_it = isinstance(value, array) and value is getattr(asked, name, None)
        fields.append([_ASKED] if with_it else value)
    return fields


def _other(value: Any) -> Any:
    """What msgpack does not know itself, as what it knows."""
    kind = type(value)
    if kind is array:
        return [_ARRAY, value.typecode, value.tobytes()]
    if kind is tuple:
        return [_TUPLE, *value]
    name = kind.__name__
    if event_classes().get(name) is not kind:
        return _container(value)
    if isinstance(value, Enum):
        return [name, value.value]
    if isinstance(value, tuple):
        return [name, *value]
    return [name, *[getattr(value, field) for field in value.__dataclass_fields__]]


def _container(value: Any) -> Any:
    if isinstance(value, frozenset):
        return [_SET, *sorted(value)]
    if isinstance(value, Mapping):
        return dict(value)
    for plain in (float, int, str):  # a number of numpy's, say
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"{type(value).__name__} has no place in an event: {value!r}")


def pack(values: Any) -> bytes:
    """Values, with those of ``encode`` among them, as bytes."""
    packed = msgpack.packb(
        values, default=_other, strict_types=True, unicode_errors="surrogatepass"
    )
    return bytes(packed)


def unpack(data: bytes) -> Any:
    """What ``pack`` was given, for ``decode``. Raises ValueError."""
    return msgpack.unpackb(
        data, use_list=False, strict_map_key=False, unicode_errors="surrogatepass"
    )


def decode(values: Any, asked: object = None) -> Event | None:
    """The event again; ``asked`` is the action it answers.

    Raises:
        ValueError: it holds a class that no event has.
    """
    if values is None:
        return None
    kind = _class_of(values[0])
    names, told = _fields(kind), values[1:]
    if len(told) > len(names):
        raise ValueError(f"{values[0]} has {len(told)} fields, {len(names)} are known")
    fields = [  # an older libra has told fewer; the others have defaults
        getattr(asked, name) if value == (_ASKED,) else _decoded(value)
        for name, value in zip(names, told, strict=False)
    ]
    event: Event = kind(*fields)
    return event


def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)


def _class_of(name: str) -> Callable[..., Any]:
    try:
        return event_classes()[name]
    except KeyError as error:
        raise ValueError(f"no event has a {name!r}") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {_decoded(key): _decoded(item) for key, item in value.items()}
    if not isinstance(value, tuple):
        return value
    tag, *items = value
    if tag == _ARRAY:
        return array(items[0], items[1])
    decoded = [_decoded(item) for item in items]
    if tag == _TUPLE:
        return tuple(decoded)
    if tag == _SET:
        return frozenset(decoded)
    return _class_of(tag)(*decoded)
