"""State changes of the core: each is in a table that names its cause, and any other is a bug."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from libra_cli.config.errors import IllegalMove

State = TypeVar("State", bound=StrEnum)


def follow(
    table: Mapping[State, Mapping[State, str]], before: State, after: State, who: object
) -> State:
    """The state ``after``, which ``who`` is in from now on.

    Raises:
        IllegalMove: the table has no such change.
    """
    if after not in table[before]:
        raise IllegalMove(f"{who}: {before} -> {after}")
    return after
