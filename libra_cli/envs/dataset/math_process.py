"""A process that compares mathematical answers, a line of JSON for a line of JSON.

Sympy takes hours for some expressions, and the model decides which: in a thread, that could neither
be interrupted nor be ended. Here the kernel ends the process at its limit of CPU time, even inside
a power of two large integers, and refuses it more memory than ``MEMORY_BYTES``. The limit is of CPU
time and not of the clock, so that a busy machine makes no right answer wrong.

    {"truth": "1/3", "answer": "..."}    is answered by    {"same": true}
                                         or                {"unreadable": "1/3"}

This file is run as a script and imports nothing of libra.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

CPU_S = 3
"""Seconds of CPU time that a comparison gets: it takes milliseconds, and up to 0.2 s of a sum."""
MEMORY_BYTES = 4 << 30
"""Address space of the process; with sympy imported it uses 0.2 GiB."""
LONGEST = 20_000
"""Characters of an answer that are read, from its end."""
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")


def main() -> None:
    """Compare a truth with an answer for each line of stdin, and write each result to stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = sys.stderr  # what a library prints is no answer

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    try:
        import math_verify
    except ImportError as error:
        say({"missing": str(error)})
        return
    logging.disable()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + CPU_S + 1)
        say(_compared(math_verify.parse, math_verify.verify, request["truth"], request["answer"]))


def _limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _compared(
    parse: Callable[..., list[Any]], verify: Callable[..., bool], truth: str, answer: str
) -> dict[str, Any]:
    written = truth if _DELIMITED.search(truth) else f"${truth}$"
    # Its own time-outs are signals, which interrupt Python and not what Python calls.
    gold = parse(written, parsing_timeout=None) or parse(truth, parsing_timeout=None)
    if not gold:
        return {"unreadable": truth}
    try:
        given = parse(answer[-LONGEST:], parsing_timeout=None)
        return {"same": bool(verify(gold, given, timeout_seconds=None))}
    except Exception:  # noqa: BLE001  MemoryError and what sympy makes of an answer that is none
        return {"same": False}


if __name__ == "__main__":
    main()
