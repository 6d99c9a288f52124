"""Fills the parts of the summary from records."""

from __future__ import annotations

from typing import TypeVar, cast

P = TypeVar("P")


def part_of(kind: type[P], record: object, **others: object) -> P:
    """A ``TypedDict`` of that kind: each key is a field of the record, unless it is given."""
    return cast(
        "P",
        {
            key: others[key] if key in others else getattr(record, key)
            for key in kind.__annotations__
        },
    )
