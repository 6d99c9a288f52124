"""The syntax of ranges of hosts, as ``gpu-[01-06]``."""

from __future__ import annotations

import re
from itertools import product

MAX_RANGE = 4096
"""The most hosts that a range may name; more are a typing error."""
_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"^(\d+)(?:-(\d+))?$")


def expand_range(text: str) -> list[str]:
    """Expand ``gpu-[01-03,07]`` to gpu-01, gpu-02, gpu-03, gpu-07; several brackets multiply.

    Raises:
        ValueError: the range is malformed; the message is the reason.
    """
    if _RANGE.sub("", text).count("[") or _RANGE.sub("", text).count("]"):
        raise ValueError(f"has a bracket without its partner: {text!r}")
    literals = _RANGE.split(text)[::2]
    choices = [_range_values(body) for body in _RANGE.findall(text)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > MAX_RANGE:
        raise ValueError(f"names {total} hosts, more than {MAX_RANGE}: {text!r}")
    return [
        literals[0] + "".join(v + tail for v, tail in zip(values, literals[1:], strict=True))
        for values in product(*choices)
    ]


def _range_values(body: str) -> list[str]:
    values: list[str] = []
    for part in body.split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise ValueError(f"has a range that is not numbers: [{body}]; write it like [01-06]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"has a range that falls: {first} to {last}")
        if int(last) - int(first) >= MAX_RANGE:
            raise ValueError(f"has a range of {int(last) - int(first) + 1}, over {MAX_RANGE}")
        width = len(first) if first.startswith("0") else 0
        values += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return values
