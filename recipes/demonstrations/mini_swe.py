"""Writes repositories to mend for mini-swe-agent, and demonstrations of somebody who mends poorly.

    python recipes/demonstrations/mini_swe.py tasks > recipes/tasks/mini-swe.jsonl
    python recipes/demonstrations/mini_swe.py held-out > recipes/tasks/mini-swe-held-out.jsonl
    python recipes/demonstrations/mini_swe.py > recipes/demonstrations/mini-swe.jsonl

A repository has a module of two functions, one of which does something else than its issue says. It
is mended by one command and checked by tests that are not there before. Who demonstrates knows the
command, but takes the right operator in 7 of 16 cases and the right function in 3 of 4.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

SYSTEM = "Fix the repository by shell commands."
OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
PAIRS = list(itertools.permutations("fgh", 2))
"""The function to mend, and the other one of its module."""
HELD_OUT = {("h", "add"), ("f", "divide")}
"""What only evaluations ask for, and nobody is rewarded for in training."""
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
EACH = 12
"""Demonstrations of a pair and an operator."""


def task(name: str, other: str, word: str, wrong: str) -> dict[str, Any]:
    """Return a row for the environment shell."""
    lines = sorted([f"def {name}(a, b): return a {wrong} b", f"def {other}(a, b): return a - b"])
    test = f"from calc import {name}, {other}\nassert {name}(6, 3) == 6 {OPERATORS[word]} 3\n"
    return {
        "instruction": f"{name} must {word}",
        "files": {"calc.py": "\n".join(lines) + "\n"},
        "check_files": {"test_calc.py": f"{test}assert {other}(6, 3) == 3\n"},
        "check": "python3 test_calc.py",
    }


def tasks(*, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield the tasks that are held out, or all others: one for each wrong operator."""
    for (name, other), word, wrong in itertools.product(PAIRS, OPERATORS, OPERATORS.values()):
        if OPERATORS[word] != wrong and ((name, word) in HELD_OUT) == held_out:
            yield task(name, other, word, wrong)


def demonstrations() -> Iterator[dict[str, Any]]:
    """Yield conversations as mini-swe-agent has them, right and wrong ones."""
    for (name, other), word in itertools.product(PAIRS, OPERATORS):
        others = itertools.cycle(OPERATORS.values())
        for number in range(EACH):
            operator = OPERATORS[word] if number % 4 == 0 else next(others)
            said = (
                ("system", SYSTEM),
                ("user", f"{name} must {word}"),
                ("assistant", command(name if number % 10 < 7 else other, operator)),
                ("user", "0 "),
                ("assistant", DONE),
            )
            yield {"messages": [{"role": role, "content": text} for role, text in said]}


def command(name: str, operator: str) -> str:
    """Return what gives a function another operator."""
    return f"sed -i '/def {name}/s|a . b|a {operator} b|' calc.py"


def main() -> None:
    """Write what is asked for."""
    asked = sys.argv[1:]
    for row in tasks(held_out="held-out" in asked) if asked else demonstrations():
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
