"""What nobody expects: texts, values and bytes of any shape, and valid ones with a part changed."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
from hypothesis import strategies as st

from libra_cli.config.errors import LibraError

COUNTS: Counter[str] = Counter()
"""Inputs by boundary."""

texts = st.one_of(
    st.text(st.characters(), max_size=20),  # lone surrogates too
    st.sampled_from(
        ["", "\ud83d 1+1", "\x1b]52;c;x\x07", "\u202e", "\x00", "../../etc/passwd", "/", ".", "NaN"]
    ),
    st.just("x" * 100_000),
)
numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, float("nan"), float("inf"), -0.0, 1e308]),
)
plain = st.one_of(st.none(), st.booleans(), numbers, texts)


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


values = st.one_of(
    st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.builds(_deep, st.sampled_from([2, 90])),
)
"""What JSON can say, and NaN."""


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """A valid value in which some parts are replaced, left out or doubled."""
    if draw(st.integers(0, 9)) == 0:
        return draw(values)
    if isinstance(valid, Mapping) and valid:
        keys = draw(st.sets(st.sampled_from(sorted(valid)), max_size=2))
        made = {key: draw(changed(one)) if key in keys else one for key, one in valid.items()}
        for key in draw(st.sets(st.sampled_from(sorted(valid)), max_size=1)):
            if draw(st.booleans()):
                del made[key]
        if draw(st.integers(0, 4)) == 0:
            made[draw(texts)] = draw(values)
        return made
    if isinstance(valid, list | tuple) and valid and draw(st.booleans()):
        at = draw(st.integers(0, len(valid) - 1))
        return [*valid[:at], draw(changed(valid[at])), *valid[at + 1 :]]
    return draw(values)


def as_json(value: Any) -> bytes:
    """JSON as a careless program writes it: with NaN, and with halves of characters."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.dumps(value).encode()
    return b"null"


def as_msgpack(value: Any) -> bytes:
    """The same as msgpack, which has no integers above 64 bits."""
    with contextlib.suppress(ValueError, OverflowError, RecursionError):
        packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
        return packed
    return msgpack.packb(None)  # type: ignore[no-any-return]


@st.composite
def broken(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that are whole, cut, flipped, repeated, or anything."""
    data = draw(whole)
    how = draw(st.sampled_from(["whole", "whole", "cut", "flipped", "twice", "anything"]))
    if how == "anything":
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if how == "cut":
        return data[:at]
    if how == "flipped" and data:
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    return data * 2 if how == "twice" else data


def json_like(valid: Any) -> st.SearchStrategy[bytes]:
    """Bytes near the JSON of a valid value."""
    return broken(changed(valid).map(as_json))


@contextlib.contextmanager
def thrown_at(boundary: str) -> Iterator[None]:
    """Count an input, and allow what a user can act on."""
    COUNTS[boundary] += 1
    with contextlib.suppress(LibraError):
        yield
