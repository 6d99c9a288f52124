"""Makes word problems from stories, the same ones for the same index and seed.

A story is a text and an arithmetic expression over the same variables. Variables are drawn from
ranges or derived by an expression (a total that must be divisible is a product), and the draw is
repeated until the answer and all variables are positive integers. ``arithmetic``, the calculator
that the model may use, computes the answer from the expression.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from libra_cli.envs.arithmetic import evaluate
from libra_cli.envs.protocol import Task

_NAMES = ("Ada", "Bao", "Chidi", "Dana", "Eli", "Farah", "Goran", "Hana", "Iris", "Jonas", "Kofi")
_ITEMS = ("pencils", "stickers", "marbles", "shells", "beads", "cards", "buttons", "stamps")
_MOST_DRAWS = 1_000


@dataclass(frozen=True)
class WordProblem:
    """A kind of problem. ``{a}`` in its text is a variable; ``{n}``, ``{m}``, ``{k}`` are names."""

    text: str
    expression: str
    ranges: Mapping[str, tuple[int, int]]
    derived: Mapping[str, str] = field(default_factory=dict)
    """The expressions of derived variables, each over the variables before it."""

    @cached_property
    def steps(self) -> int:
        return len(re.findall(r"[-+*/]", self.expression))


def stories(min_steps: int, max_steps: int) -> Sequence[WordProblem]:
    """Return the stories with ``min_steps`` to ``max_steps`` operations.

    Raises:
        ValueError: there is none.
    """
    found = [story for story in STORIES if min_steps <= story.steps <= max_steps]
    if not found:
        steps = sorted({story.steps for story in STORIES})
        raise ValueError(
            f"no word problem has {min_steps} to {max_steps} steps: there are {steps[0]} to "
            f"{steps[-1]}"
        )
    return found


def word_problem(index: int, seed: int, among: Sequence[WordProblem]) -> Task:
    """Make problem ``index`` of the stream ``seed``, with its question, answer and expression."""
    # A string seeds through a hash of its own, so neighbouring indices are unrelated.
    source = random.Random(f"{seed}/{index}")
    story = source.choice(among)
    name, other, third = source.sample(_NAMES, 3)
    words = {"n": name, "m": other, "k": third, "item": source.choice(_ITEMS)}
    for _ in range(_MOST_DRAWS):
        values = _draw(story, source)
        expression = story.expression.format(**values)
        answer = evaluate(expression)
        if all(_natural(value) for value in (*values.values(), answer)):
            shown = {variable: str(value) for variable, value in values.items()}
            question = story.text.format(**shown, **words)
            return {"question": question, "answer": int(answer), "expression": expression}
    raise ValueError(f"no draw suits the story {story.text!r}")


def _draw(story: WordProblem, source: random.Random) -> dict[str, Fraction]:
    values = {
        variable: Fraction(source.randint(low, high))
        for variable, (low, high) in story.ranges.items()
    }
    for variable, expression in story.derived.items():
        values[variable] = evaluate(expression.format(**values))
    return values


def _natural(value: Fraction) -> bool:
    return value.denominator == 1 and value > 0


STORIES = (
    WordProblem(
        "{n} has {a} {item} and finds {b} more. How many {item} does {n} have now?",
        "{a} + {b}",
        {"a": (120, 980), "b": (110, 870)},
    ),
    WordProblem(
        "{n} buys {a} packs of {item} with {b} in every pack, and gives {c} of them to {m}. "
        "How many {item} does {n} have left?",
        "{a} * {b} - {c}",
        {"a": (6, 38), "b": (12, 48), "c": (15, 70)},
    ),
    WordProblem(
        "A truck carries {a} crates of {b} kg each and one machine of {c} kg. "
        "How many kg does it carry in all?",
        "{a} * {b} + {c}",
        {"a": (14, 60), "b": (17, 85), "c": (140, 990)},
    ),
    WordProblem(
        "{n} earns {a} coins a day for {b} days and splits them evenly with {m} and {k}. "
        "How many coins does each of the three get?",
        "{a} * {b} / 3",
        {"u": (12, 60), "b": (5, 28)},
        {"a": "{u} * 3"},
    ),
    WordProblem(
        "A printer prints {a} pages a minute. It has to print {c} copies of a booklet of {b} "
        "pages, and it stands still for {d} minutes in between. "
        "How many minutes does the whole job take?",
        "{b} * {c} / {a} + {d}",
        {"a": (6, 24), "u": (2, 9), "c": (15, 90), "d": (3, 25)},
        {"b": "{a} * {u}"},
    ),
    WordProblem(
        "In the morning a bakery bakes {a} trays of {b} rolls, and in the afternoon {c} trays of "
        "{d} rolls. How many rolls does it bake that day?",
        "{a} * {b} + {c} * {d}",
        {"a": (12, 45), "b": (16, 36), "c": (8, 30), "d": (18, 54)},
    ),
    WordProblem(
        "A tank holds {a} litres, and {d} litres are already in it. Every minute {b} litres flow "
        "in and {c} litres leak out. After how many minutes is it full?",
        "({a} - {d}) / ({b} - {c})",
        {"b": (24, 75), "c": (3, 20), "d": (35, 240), "u": (9, 48)},
        {"a": "{d} + ({b} - {c}) * {u}"},
    ),
    WordProblem(
        "{n} drives for {a} hours at {b} km/h and then for {c} hours at {d} km/h. The whole way "
        "is {e} km. How many km are left?",
        "{e} - ({a} * {b} + {c} * {d})",
        {"a": (2, 6), "b": (48, 95), "c": (2, 7), "d": (62, 118), "u": (18, 240)},
        {"e": "{a} * {b} + {c} * {d} + {u}"},
    ),
    WordProblem(
        "A ticket costs {a} coins for an adult and {b} coins for a child. A group of {c} adults "
        "and {d} children pays with {e} coins. How many coins does it get back?",
        "{e} - ({a} * {c} + {b} * {d})",
        {"a": (17, 36), "b": (6, 15), "c": (3, 14), "d": (4, 32), "u": (1, 3)},
        {"e": "(ceil(({a} * {c} + {b} * {d}) / 100) + {u}) * 100"},
    ),
    WordProblem(
        "A coat costs {a} coins. In a sale its price falls by {p} percent. {n} buys {b} of these "
        "coats in the sale. How many coins does {n} pay?",
        "{b} * {a} * (100 - {p}) / 100",
        {"u": (3, 14), "v": (1, 12), "b": (2, 9)},
        {"a": "{u} * 20", "p": "{v} * 5"},
    ),
    WordProblem(
        "{a} hens lay {b} eggs each a week. The eggs are sold in boxes of {c}, for {d} coins a "
        "box. How many coins do the eggs of {e} weeks bring?",
        "{a} * {b} * {e} / {c} * {d}",
        {"c": (6, 12), "u": (4, 15), "b": (3, 7), "d": (2, 9), "e": (3, 26)},
        {"a": "{c} * {u}"},
    ),
    WordProblem(
        "{a} machines make {b} parts an hour each and run for {c} hours. One part in {d} is "
        "faulty and is thrown away. How many good parts are there?",
        "{a} * {b} * {c} / {d} * ({d} - 1)",
        {"d": (4, 12), "u": (2, 6), "b": (11, 45), "c": (5, 16)},
        {"a": "{d} * {u}"},
    ),
)
