"""The environment ``reasoning-gym``: problems of 102 generators, each answered in text, no tools.

``datasets`` names generators, or maps their names to options. A task is ``{"dataset": name,
"seed": int, "index": int}``; the problem is made again from it, since not every problem survives
JSON. The streams of several datasets take turns.

**The reward** is what the dataset's scorer gives to the text of the last ``<answer>...</answer>``,
from 0 to 1; without one it is 0. Many scorers give some credit to nonsense (``spell_backward``:
0.14), so by default a reward below ``threshold`` 1.0 counts as 0. ``threshold: null`` keeps them.

Read in reasoning-gym 0.1.25 and fenced here:

- Three datasets are refused, since one constant answer wins each (``REFUSED``).
- Nine scorers run the answer as Python, by ``eval`` or sympy's ``parse_expr`` (one of them is
  refused anyway). There, an answer that is not plain numbers and words, or for an expression not
  short arithmetic with small exponents, is scored 0 without being shown to the scorer. So
  ``Integral(...)`` is none of an integral, for which the scorers would give full marks.
- A scorer that raises (``prime_factorization``, of text that is no number) scores 0.
- Three datasets build all their problems at once, a fourth refuses large sizes: they have
  ``FINITE`` problems a seed, and then go on with another seed.
- ``pool_matrix`` and ``list_functions`` draw from generators that the process shares, so problems
  are made one at a time.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.config.errors import EnvironmentBroken, did_you_mean
from libra_cli.envs.gyms.packages import imported
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema

INSTALL = "pip install 'libra-rl[reasoning]'"
INSTRUCTIONS = "Give the final answer, and nothing else, between <answer> and </answer>."
REFUSED = {
    "coin_flip": "its scorer gives full marks to the answer 0, always",
    "composite": "it is a mixture; name several datasets instead",
    "game_of_life_halting": "its scorer gives full marks to every answer",
    "puzzle24": "its scorer takes any four numbers that make 24, so 6 + 6 + 6 + 6 always wins",
}
FINITE = 1000
"""Problems a seed of the datasets that cannot be endless."""

_ENDLESS = 1 << 31
_BUILT_AT_ONCE = frozenset(("acre", "gsm_symbolic", "list_functions", "word_ladder"))
_EVALUATED = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
_EXPRESSIONS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "simple_integration")
)
_PLAIN = re.compile(r"[\w\s\[\],'\"-]*")
_OPEN, _CLOSE = "<answer>", "</answer>"
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
_FUNCTIONS = re.compile(r"a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt")
_LONGEST = 1_000
_LARGEST = 10**12
_LARGEST_POWER = 99
_MAKING = threading.Lock()


class ReasoningGym:
    """The environment of one problem of reasoning-gym.

    ``datasets`` are names, or names with options of the generator.

    Raises:
        EnvironmentBroken: reasoning-gym is not installed, or a dataset is unknown or refused.
    """

    def __init__(
        self,
        datasets: Sequence[str] | Mapping[str, Mapping[str, Any]],
        threshold: float | None = 1.0,
    ) -> None:
        self._options = (
            dict(datasets) if isinstance(datasets, Mapping) else {n: {} for n in datasets}
        )
        if not self._options:
            raise EnvironmentBroken("reasoning-gym: datasets must name at least one dataset")
        for name, options in self._options.items():
            _check(name)
            if options:
                _data(name, 0, json.dumps(options))
        self._threshold = threshold
        self._name = ""
        self._data: Any = None
        self._problem: Mapping[str, Any] = {}
        self._credit = 0.0
        self._answered = False

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return ()

    def task(self, index: int, seed: int) -> Task:
        """Return where problem ``index`` of the stream ``seed`` is; the datasets take turns."""
        names = list(self._options)
        place, which = divmod(index, len(names))
        name = names[which]
        again, place = divmod(place, FINITE if name in _BUILT_AT_ONCE else _ENDLESS)
        return {"dataset": name, "seed": seed + again * 1_000_003, "index": place}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin with the problem's question.

        Raises:
            ValueError: the task is none of these datasets.
        """
        name = task.get("dataset")
        if name not in self._options:
            raise ValueError(f"a task names a dataset of {', '.join(self._options)}, not {task!r}")
        self._name = name
        with _MAKING:
            self._data = _data(name, int(task["seed"]), json.dumps(self._options[name]))
            self._problem = self._data[int(task["index"])]
        question = self._problem["question"]
        return [{"role": "user", "content": f"{question}\n\n{INSTRUCTIONS}"}]

    @property
    def truth(self) -> str:
        """The dataset's own answer to the problem; empty where it states none."""
        return str(self._problem.get("answer") or "")

    def step(self, call: ToolCall) -> str:
        raise ToolFailed("there are no tools; answer in text")

    def score(self, answer: str) -> float:
        """Return what the scorer gives to the text between the answer tags."""
        found = last_answer(answer)
        self._answered = found is not None
        self._credit = self._credit_for(found.strip()) if found is not None else 0.0
        if self._threshold is None:
            return self._credit
        return float(self._credit >= self._threshold)

    def metrics(self) -> Mapping[str, float]:
        """Return whether there was an answer, and the scorer's credit before the threshold."""
        return {"answered": float(self._answered), "credit": self._credit}

    def _credit_for(self, answer: str) -> float:
        if not harmless(self._name, answer):
            return 0.0
        try:
            credit = float(self._data.score_answer(answer=answer, entry=self._problem))
        except Exception:  # noqa: BLE001  some scorers raise on what they cannot read
            return 0.0
        return min(1.0, max(0.0, credit)) if math.isfinite(credit) else 0.0


def last_answer(text: str) -> str | None:
    """Return the text of the last ``<answer>...</answer>``, in time linear in the text's length:
    a policy that only opens it, thousands of times, would else hold the whole process up."""
    found, at = None, 0
    while (begin := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, begin)) >= 0:
        found, at = text[begin + len(_OPEN) : end], end + len(_CLOSE)
    return found


def names() -> Sequence[str]:
    """Return the names that ``datasets`` may have: the package's, but for those in ``REFUSED``."""
    return sorted(set(imported("reasoning_gym.factory", INSTALL).DATASETS) - set(REFUSED))


def problem(task: Task) -> Mapping[str, Any]:
    """Return the question, the answer and what else the package knows of a task."""
    with _MAKING:
        found: Mapping[str, Any] = _data(task["dataset"], int(task["seed"]), "{}")[task["index"]]
        return found


def harmless(dataset: str, answer: str) -> bool:
    """Whether an answer may be shown to a dataset's scorer, which perhaps runs it as Python."""
    if dataset in _EVALUATED:
        return _PLAIN.fullmatch(answer) is not None
    return dataset not in _EXPRESSIONS or _is_small_arithmetic(answer)


def _is_small_arithmetic(text: str) -> bool:
    if len(text) > _LONGEST:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return _is_small(tree.body, 1.0)


def _is_small(node: ast.expr, power: float) -> bool:
    """Whether an expression is arithmetic whose numbers stay small when raised to ``power``."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and abs(value) <= _LARGEST
        case ast.Name(id=name):
            return len(name) == 1 or name == "pi"
        case ast.UnaryOp(op=operator, operand=inner):
            return isinstance(operator, _OPERATORS) and _is_small(inner, power)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            power *= max(1.0, _magnitude(exponent))
            return power <= _LARGEST_POWER and _is_small(base, power)
        case ast.BinOp(left=left, op=operator, right=right):
            known = isinstance(operator, _OPERATORS)
            return known and _is_small(left, power) and _is_small(right, power)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return _FUNCTIONS.fullmatch(name) is not None and _is_small(argument, power)
        case _:
            return False


def _magnitude(exponent: ast.expr) -> float:
    """Return the size of an exponent: a number, a quotient of two, or a symbol; else infinity."""
    match exponent:
        case ast.Constant(value=int() | float() as value):
            return abs(value)
        case ast.Name(id=name) if len(name) == 1:
            return 1.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            return _magnitude(inner)
        case ast.BinOp(left=above, op=ast.Div(), right=ast.Constant(value=int(below))) if below:
            return _magnitude(above)
        case _:
            return math.inf


def _check(name: str) -> None:
    known = names()
    if name in REFUSED:
        raise EnvironmentBroken(f"reasoning-gym's dataset {name!r} is refused: {REFUSED[name]}")
    if name not in known:
        raise EnvironmentBroken(
            f"reasoning-gym has no dataset {name!r}{did_you_mean(name, known)}",
            hint=f"it has: {', '.join(known)}",
        )


@functools.lru_cache(maxsize=256)
def _data(name: str, seed: int, options: str) -> Any:
    size = FINITE if name in _BUILT_AT_ONCE else _ENDLESS
    make = imported("reasoning_gym", INSTALL).create_dataset
    try:
        return make(name, **{"size": size, "seed": seed, **json.loads(options)})
    except (AssertionError, TypeError) as error:
        raise EnvironmentBroken(
            f"reasoning-gym's dataset {name!r} cannot be made with {options}: {error}",
            hint=f"see the options of {name} in reasoning-gym",
        ) from error
