"""Which mistakes are made in a file, and by which tests they should be noticed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import OVERTIME, report, stages_of
from tests.mutation.mistakes import ROOT, Mutant, function_at, mistakes, mutants_of
from tests.mutation.reach import Reach

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
        assert mutant.function


NEAR, NAMED, FAR = (
    "tests/unit/core/scheduling/test_policy.py::test_near",
    "tests/unit/core/scheduling/test_request_scheduler.py::test_named[1]",
    "tests/unit/core/test_machine.py::test_far",
)


def mutant(after: str) -> Mutant:
    """One of a function that two tests run directly and one from afar."""
    return Mutant(LEAST_COST, "a\n", after, 1, "LeastCost.choose")


def reach_of(told: dict[str, list[str]]) -> Reach:
    """Tests with what they run; each later one takes a second more."""
    seconds = {test: float(number) for number, test in enumerate(told)}
    run_by: dict[tuple[str, str], set[str]] = {}
    for test, functions in told.items():
        for function in functions:
            run_by.setdefault((str(LEAST_COST), function), set()).add(test)
    return Reach(seconds, run_by)


def test_the_nearest_tests_of_a_function_are_asked_first_and_the_short_ones_before_the_long():
    reach = reach_of({test: ["LeastCost.choose"] for test in (FAR, NAMED, NEAR)} | {"x": ["other"]})
    assert stages_of(mutant("b\n"), reach) == [[NAMED, NEAR], [FAR]]
    assert stages_of(mutant("b\n"), reach_of({FAR: ["LeastCost.choose"]})) == [[FAR]]


def test_of_a_function_that_no_test_runs_the_files_that_name_it_are_asked():
    (naming,) = stages_of(mutant("b\n"), reach_of({}))
    assert NAMED.split("::")[0] in naming


def test_a_mutant_is_of_the_outermost_function_and_of_none_in_a_class():
    tree = ast.parse("class A:\n  x = 1\n  @p\n  def f(self):\n    def g(): pass\nif x:\n  y = 2")
    named = [function_at(tree, line) for line in range(1, 8)]
    assert named == ["", "", "A.f", "A.f", "A.f", "", ""]


def test_it_is_measured_which_tests_run_a_function(tmp_path):
    """Also in a thread, and by what they share."""
    tests = """
import threading, pytest
from libra_cli.core.reconcile.migration import SlotMigration

@pytest.fixture(scope="module")
def move():
    move = SlotMigration(1, 0, "a/0", None, None, False, None, 0.0)
    move.record()
    return move

def test_sees(move):
    assert move.phase is None

def test_enters(move):
    thread = threading.Thread(target=move.end, args=("done",), kwargs={"now": 1.0})
    thread.start()
    thread.join()
"""
    (tmp_path / "test_it.py").write_text(tests)
    plugin = "-p", "tests.mutation.reach", "-p", "no:cacheprovider", "--reach", tmp_path / "reach"
    argv = [sys.executable, "-m", "pytest", "-q", *plugin, f"--rootdir={tmp_path}", tmp_path]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    reach = Reach.read(tmp_path / "reach")
    path = Path("libra_cli/core/reconcile/migration.py")
    assert reach.of(path, "SlotMigration.phase") == ["test_it.py::test_sees"]
    assert reach.of(path, "SlotMigration.end") == ["test_it.py::test_enters"]
    assert reach.of(path, "SlotMigration.record") == ["test_it.py"]
    assert reach.of(path, "SlotMigration.enter") == []


def test_what_is_alive_is_shown_and_counted_by_folder():
    noticed = {mutant("b\n"): NEAR, mutant("c\n"): "", mutant("d\n"): NEAR + OVERTIME}
    told = report(noticed, of=9)
    assert "+c" in told
    assert "+b" not in told
    row, total = told.splitlines()[-2:]
    assert row.split()[:5] == ["core/scheduling", "2", "of", "3", "killed,"]
    assert row.endswith("21% to 94%, 1 by a crash or a time limit")
    assert total.split()[:5] == ["all", "2", "of", "3", "killed,"]
