"""The contract of a part of the machine, and the look-up of whose an event or an action is.

A part takes the events of one union and asks for the actions of another. It is told of every such
event, and knows whether the end of such an action is still waited for; what one event means for
another part it says with a notice. An event that concerns several parts goes to all of them, in
the order in which the machine lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType
from typing import Any, ClassVar, Protocol, TypeVar, get_args

from libra_cli.core.notices import Result
from libra_cli.core.types import Seconds

T = TypeVar("T")


class Taker(Protocol):
    """A part that takes the events of one union."""

    events: ClassVar[Any]
    """The union of the events that it takes."""

    def handle(self, event: Any, *, now: Seconds) -> Iterable[Result]:
        """Return the actions and notices that follow from one of its events."""


class Part(Taker, Protocol):
    """A part of the machine, which decides about one thing: the
    servers, the trainer, the trajectories.
    """

    actions: ClassVar[Any]
    """The union of the actions that it asks for."""

    def wants(self, action: Any) -> bool:
        """Whether the end of one of its actions is still waited for."""


def kinds_of(union: Any) -> tuple[type, ...]:
    """The classes of a union, or the one class that it is."""
    return get_args(union) if isinstance(union, UnionType) else (union,)


def takers(owners: Iterable[tuple[Any, T]], every: Any) -> dict[type, tuple[T, ...]]:
    """Return, for each class of the union ``every``, the owners whose own union has it, in this
    order.

    Raises:
        TypeError: a class has no owner, or an owner has a class that is not in the union.
    """
    found: dict[type, tuple[T, ...]] = dict.fromkeys(kinds_of(every), ())
    for union, owner in owners:
        for kind in kinds_of(union):
            if kind not in found:
                raise TypeError(f"{kind.__name__} is not in the union")
            found[kind] = (*found[kind], owner)
    nobody = [kind.__name__ for kind, some in found.items() if not some]
    if nobody:
        raise TypeError(f"nobody has {', '.join(nobody)}")
    return found


def takers_of_one(owners: Iterable[tuple[Any, T]], every: Any) -> dict[type, T]:
    """The same where each class has one owner.

    Raises:
        TypeError: a class has nobody, or two.
    """
    found = takers(owners, every)
    shared = [kind.__name__ for kind, some in found.items() if len(some) > 1]
    if shared:
        raise TypeError(f"{', '.join(shared)} have more than one owner")
    return {kind: owner for kind, (owner,) in found.items()}
