"""Which mistakes are made in a file, and by which tests they should be noticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.__main__ import report, stages_of
from tests.mutation.mistakes import Mutant, mistakes, mutants_of

LEAST_COST = Path("libra_cli/core/scheduling/least_cost.py")


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("a < b", ["(a <= b)"]),
        ("a is None", ["(a is not None)"]),
        ("a and b", ["(a or b)"]),
        ("not (a or b)", ["(a or b)", "(a and b)"]),
        ("a * (b + c)", ["(a / (b + c))", "(b - c)"]),
        ("a += 1", ["a -= 1", "2"]),
        ("x = min(a, b)", ["max(a, b)"]),
        ("x.forget()", ["pass"]),
        ("x.failures = a", ["pass"]),
        ("x.busy = False", ["pass", "True"]),
    ],
)
def test_a_mistake_is_made_at_every_place(code, texts):
    made = mistakes(ast.parse(f"def it():\n    {code}"))
    assert [text for _, text in made] == texts


@pytest.mark.parametrize(
    "code",
    [
        "MOST = 3",
        "class A:\n    size: int = 3",
        "assert a < b",
        "raise ValueError(1)",
        "log.info(a)",
        "x = zip(a, b, strict=True)",
        "@dataclass(frozen=True)\nclass A: pass",
        "f'{a + b}'",
        "'a' + b",
        "a | b",
    ],
)
def test_none_is_made_where_no_test_should_notice(code):
    assert list(mistakes(ast.parse(code))) == []


def test_every_mutant_of_a_file_is_another_text_that_can_be_read():
    mutants = mutants_of(LEAST_COST)
    assert len({mutant.after for mutant in mutants}) == len(mutants) > 20
    for mutant in mutants:
        assert mutant.after != mutant.before
        ast.parse(mutant.after)


def test_the_nearest_tests_are_asked_first_and_each_once():
    stages = stages_of(LEAST_COST)
    nearest = "tests/unit/core/scheduling/test_request_scheduler.py"
    assert nearest in stages[0]
    assert "tests/unit/core/test_machine.py" in stages[-1]
    every = [test for stage in stages for test in stage]
    assert len(every) == len(set(every))


def test_what_is_alive_is_shown_and_counted_by_folder():
    seen, unseen = Mutant(LEAST_COST, "a\n", "b\n"), Mutant(LEAST_COST, "a\n", "c\n")
    told = report({seen: "tests/x.py::test_y", unseen: ""}, of=9)
    assert "+c" in told
    assert "+b" not in told
    assert told.splitlines()[-2].split() == ["core/scheduling", "1", "of", "2", "killed"]
    assert told.splitlines()[-1].split()[:5] == ["all", "1", "of", "2", "killed,"]
