"""What a dataclass is in JSON: an object by its own names, the same wherever it is shown.

Every field is a key, but for those whose metadata are ``HIDDEN``. A field that holds JSON, as
``phases_json``, is shown as what it says, by the property ``phases``. A class may show more: its
``SHOWN`` maps a key to the property or the field that has it, such as the name of an older libra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from math import inf, isfinite
from types import NoneType
from typing import Any, Final, TypeVar, cast, get_args, get_type_hints

HIDDEN: Final[Mapping[str, bool]] = {"shown": False}
"""Metadata of a field that is no key."""

T = TypeVar("T")


@cache
def shown(kind: type) -> Mapping[str, str]:
    """Key -> the attribute of the dataclass that has it."""
    own = [field.name for field in fields(kind) if field.metadata.get("shown", True)]
    also: Mapping[str, str] = getattr(kind, "SHOWN", {})
    return {name: name for name in (one.removesuffix("_json") for one in own)} | dict(also)


@cache
def hints(kind: type) -> Mapping[str, Any]:
    """Key -> its type, in the order of ``shown``."""
    declared = _declared(kind)
    return {
        key: declared[name]
        if name in declared
        else get_type_hints(getattr(kind, name).fget)["return"]
        for key, name in shown(kind).items()
    }


@cache
def _declared(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def json_form(value: Any) -> Any:
    """The value as ``json.dumps`` takes it. JSON knows no NaN and no infinity: they are null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_form(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {key: json_form(getattr(value, name)) for key, name in shown(type(value)).items()}
    return value


def from_json_form(kind: type[T], value: Any) -> T:
    """The dataclass that ``json_form`` made the value of; a null that may not be None is infinite.

    Keys that it has no field for are left out.
    """
    declared = _declared(cast("type", kind))
    told = {name: _read(declared[name], item) for name, item in value.items() if name in declared}
    return kind(**told)


def _read(hint: Any, value: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if value is None:
        return None if NoneType in kinds else inf
    kind = kinds[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return from_json_form(kind, value) if isinstance(kind, type) and is_dataclass(kind) else value
