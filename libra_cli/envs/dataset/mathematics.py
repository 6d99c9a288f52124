"""The reward ``math``: 1 if the answer is mathematically equal to the row's, by math-verify.

The truth is LaTeX or plain, a number or a list of which one must be equal; of a text that shows its
work, what follows the last ``####`` or stands in the last ``\\boxed{}``. How an answer is found in
the text, and when two are equal (``x = 5`` and ``5``, ``1/3`` and ``2/6``, but not ``0.333``), is
https://github.com/huggingface/Math-Verify.

Comparisons run in processes of their own (see ``envs.dataset.math_process``), up to ``MOST`` side
by side. One that takes longer than ``CPU_S`` seconds of CPU time counts as wrong, and as 1 in the
metric ``math_too_long``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.dataset import math_process
from libra_cli.envs.dataset.match import text_of, worked_out

MOST = min(4, os.cpu_count() or 1)
"""Processes that compare at the same time, at most."""


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Return 1 as ``score`` if the answer equals the truth, or one of them, else 0.

    Raises:
        EnvironmentBroken: math-verify is not installed, or cannot read the truth.
    """
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    texts = [text_of(truth) for truth in truths]
    too_long = False
    for text in texts:
        same = _POOL.compare(worked_out(text) or text, solution_str)
        if same:
            return {"score": 1.0}
        too_long = too_long or same is None
    return {"score": 0.0, "too_long": float(too_long)}


class _Comparer:
    """One process, which is started when it is made."""

    def __init__(self) -> None:
        # In a session of its own, Ctrl-C does not reach it before the run has ended.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(math_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        said = self._read()
        if said is None or "missing" in said:
            self.close()
            why = said["missing"] if said else "its process did not start"
            raise EnvironmentBroken(
                f"the reward math cannot be used: {why}", hint="pip install 'libra-rl[math]'"
            )

    def compare(self, truth: str, answer: str) -> dict[str, Any] | None:
        """Send a pair to the process, and return its answer; None if the process has ended."""
        with contextlib.suppress(OSError):  # it has ended, as what it says will show
            self._requests.write(json.dumps({"truth": truth, "answer": answer}) + "\n")
            self._requests.flush()
        return self._read()

    def close(self) -> int:
        """Let it end, and return the signal that it had ended by before, or 0."""
        with contextlib.suppress(OSError):  # a request that it did not read
            self._requests.close()
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._answers.close()
        return max(-code, 0)

    def _read(self) -> dict[str, Any] | None:
        line = self._answers.readline()
        said: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return said


class _ComparerPool:
    """The processes that are idle, kept for the next comparison."""

    def __init__(self) -> None:
        self._idle: list[_Comparer] = []
        self._permits = threading.Semaphore(MOST)

    def compare(self, truth: str, answer: str) -> bool | None:
        """Return whether the answer is the truth; None if that took too long."""
        with self._permits:
            try:
                comparer = self._idle.pop()
            except IndexError:
                comparer = _Comparer()
            said = comparer.compare(truth, answer)
            if said is None:
                number = comparer.close()
                if number == signal.SIGXCPU:
                    return None
                raise EnvironmentBroken(f"the process of the reward math ended (signal {number})")
            self._idle.append(comparer)
        if "unreadable" in said:
            raise EnvironmentBroken(
                f"the row's truth {truth!r} is no mathematics that math-verify can read",
                hint="environment: {args: {reward: match}}, or {args: {truth: COLUMN}}",
            )
        return bool(said["same"])

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


_POOL = _ComparerPool()
atexit.register(_POOL.close)
