"""The environment ``calculator``: word problems with a calculator, for a model such as Qwen3.

A task is ``{"question": str, "answer": number}``, a line of a JSONL file or one that
``word_problems`` makes. The answer may be a string; then its number is found as in a reply (so
``"... #### 72"`` works). The tool is ``arithmetic``.

**The reward** is 1 if the reply's number is exactly the answer's, else 0. The reply's number is the
first of these that exists: the number in the last ``\\boxed{}``; the first number after the last
``answer:`` or ``answer is`` (after the last ``=`` of that line, if it has one); the last number of
the text. Numbers are compared as exact fractions: ``1,250.0``, ``$1250`` and ``2500/2`` are the
same, and ``0.33`` is not ``1/3``. Thinking and tool calls are no part of a reply.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from libra_cli.envs.arithmetic import FUNCTIONS, evaluate, shown
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema, function
from libra_cli.envs.word_problems import stories, word_problem

INSTRUCTIONS = (
    "Use the calculator for the arithmetic. When you are done, end with a line of the form\n"
    "Answer: <number>"
)

_NUMBER = re.compile(
    r"(?<![\w.])-?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d{1,3})?(?:\s?/\s?\d+)?"
)
_ANSWER = re.compile(r"\banswer\b\W{0,3}?(?:\s+is\b|:|=)", re.IGNORECASE)
_FRACTION = re.compile(r"\\d?frac\{(\d+)\}\{(\d+)\}")


class Calculator:
    """The environment of one word problem, with a calculator as its tool.

    ``min_steps`` and ``max_steps`` bound the operations of the problems of ``task``, and have no
    effect with a tasks file. ``instructions`` follow every question.

    Raises:
        ValueError: there are no problems with so many steps.
    """

    def __init__(
        self, min_steps: int = 2, max_steps: int = 5, instructions: str = INSTRUCTIONS
    ) -> None:
        self._stories = stories(min_steps, max_steps)
        self._instructions = instructions
        self._answer: Fraction | None = None

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The one tool, ``calculator``, whose argument is an expression."""
        return (
            function(
                "calculator",
                "Evaluate an arithmetic expression with + - * / // % ** and parentheses, and "
                f"the functions {', '.join(sorted(FUNCTIONS))}.",
                {"expression": {"type": "string", "description": "For example (3 + 4) * 12.5"}},
            ),
        )

    def task(self, index: int, seed: int) -> Task:
        """Make problem ``index`` of the stream that ``seed`` names."""
        return word_problem(index, seed, self._stories)

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin with the task's question.

        Raises:
            ValueError: the task has no question or no answer with a number.
        """
        question, answer = task.get("question"), task.get("answer")
        self._answer = number_in(str(answer)) if answer is not None else None
        if not isinstance(question, str) or self._answer is None:
            raise ValueError(f"a task is {{'question': str, 'answer': number}}, not {task!r}")
        content = f"{question}\n\n{self._instructions}" if self._instructions else question
        return [{"role": "user", "content": content}]

    def step(self, call: ToolCall) -> str:
        """Evaluate an expression; ToolFailed if that is impossible."""
        if call.name != "calculator":
            raise ToolFailed(f"there is no tool {call.name!r}, only calculator")
        return shown(evaluate(str(call.arguments.get("expression", ""))))

    def score(self, answer: str) -> float:
        """Return 1 if the reply's number is the task's, else 0."""
        return float(self._answer is not None and number_in(answer) == self._answer)


def number_in(text: str) -> Fraction | None:
    """Find the number that a reply gives as its answer, as the module docstring defines it."""
    text = _FRACTION.sub(r"\1/\2", text.replace("−", "-"))
    boxed = last_boxed(text)
    if boxed is not None:
        return _first_number(boxed.rpartition("=")[2])
    answers = list(_ANSWER.finditer(text))
    if answers:
        line = text[answers[-1].end() :].strip().partition("\n")[0]
        return _first_number(line.rpartition("=")[2])
    numbers = _NUMBER.findall(text)
    return _number(numbers[-1]) if numbers else None


def as_number(text: str) -> Fraction | None:
    """Return the number that a text consists of; None if it is more or less than one."""
    found = _NUMBER.fullmatch(text.replace("−", "-").strip())
    return _number(found[0]) if found else None


def last_boxed(text: str) -> str | None:
    """Return what stands in the last ``\\boxed{}``, to the end if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = text[start + len("\\boxed{") :]
    depth = 1
    for position, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:position]
    return inside


def _first_number(text: str) -> Fraction | None:
    found = _NUMBER.search(text)
    return _number(found[0]) if found else None


def _number(text: str) -> Fraction | None:
    digits = re.sub(r"[\s,$]", "", text)
    above, _, below = digits.partition("/")
    try:
        return Fraction(above) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):
        return None  # more digits than Python converts, or a division by zero
