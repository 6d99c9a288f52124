"""Writes an exception that nobody expected as the reason of a failure."""

from __future__ import annotations

MOST_CHARACTERS = 500
"""Characters of an exception's text in a reason; the whole text is in the controller's log."""


def words_of(error: BaseException) -> str:
    """What went wrong, in one line that begins with the kind of the exception."""
    kind, said = type(error).__name__, " ".join(str(error).split())[:MOST_CHARACTERS]
    return f"{kind}: {said}" if said else kind
