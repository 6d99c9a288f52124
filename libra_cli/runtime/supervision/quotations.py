"""What events quote of hosts, processes, environments and agents, made safe once, at the edge.

Records, notes, status and reports all have their sentences from events. So nothing of them has a
secret that libra knows, nothing that a terminal obeys, and nothing that cannot be encoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

from libra_cli.config.errors import LibraError
from libra_cli.config.text import printable
from libra_cli.core.events import Event

T = TypeVar("T", bound=Event)

LONGEST = 10_000
"""Characters of one quotation: the last lines of a log fit, an observation of 50 MB does not."""
_QUOTING = frozenset({"reason", "detail", "why_not"})
"""Names of the fields of events that quote what others have said."""


def quoted(text: str, mask: Callable[[str], str]) -> str:
    """The text as it may be told: not too long, without secrets, printable."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}\n[...]\n{text[-LONGEST // 2 :]}"
    return printable(mask(text))


def with_quotations(event: T, mask: Callable[[str], str]) -> T:
    """Return the event with what it quotes shortened, printable and without secrets."""
    kind: Any = type(event)
    names = _quoting(kind)
    if not names:
        return event
    told = {name: quoted(getattr(event, name), mask) for name in names}
    return replace(event, **told)  # type: ignore[arg-type]


@contextmanager
def masked_errors(mask: Callable[[str], str]) -> Iterator[None]:
    """Let exceptions pass with what they say, and what to type next, masked."""
    try:
        yield
    except Exception as error:
        error.args = tuple(mask(one) if isinstance(one, str) else one for one in error.args)
        if isinstance(error, LibraError):
            error.hint = mask(error.hint)
        raise


@functools.cache
def _quoting(kind: type[Event]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name in _QUOTING)
