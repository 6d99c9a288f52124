"""Fills the parts of the summary from records."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")


def part_of(kind: type[P], record: object, **others: Any) -> P:
    """A part of that kind: each field is the record's of that name, unless it is given."""
    same = {one.name: getattr(record, one.name) for one in fields(kind) if one.name not in others}
    return kind(**same, **others)
