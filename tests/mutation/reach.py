"""Which tests run which function. ``pytest -p tests.mutation.reach --reach FILE`` measures it.

No other test can notice a mistake in it, but for those that run it in another process.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import pytest

from tests.mutation.mistakes import ROOT, function_at


@dataclass(frozen=True)
class Reach:
    """By file and function the tests that run it, and how many seconds each test takes."""

    seconds: Mapping[str, float]
    tests: Mapping[tuple[str, str], set[str]]

    @classmethod
    def read(cls, file: Path) -> Reach:
        """What was measured."""
        told = json.loads(file.read_text())
        tests: dict[tuple[str, str], set[str]] = defaultdict(set)
        for test, (_, numbers) in told["tests"].items():
            for path, function in (told["functions"][number] for number in numbers):
                tests[path, function].add(test)
                tests[path, ""].add(test)
        return cls({test: seconds for test, (seconds, _) in told["tests"].items()}, tests)

    def of(self, path: Path, function: str) -> list[str]:
        """Tests that run a function, the shortest first; of no function, that run any of the
        file."""
        found = self.tests.get((str(path), function), set())
        parts = (test for test in found if "::" not in test or test.split("::")[0] not in found)
        return sorted(parts, key=lambda test: (self.seconds[test], test))


class Measure:
    """A plugin of pytest that notes each function of the package that is called."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._run: dict[str, set[CodeType]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)
        self._test = ""
        self._now = self._run[""]

    def pytest_sessionstart(self) -> None:
        """Listen to calls, which is all that a tracer hears that returns nothing."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, _event: str, _arg: object) -> None:
        self._now.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """What runs now is run by this test."""
        self._test = item.nodeid
        self._now = self._run[item.nodeid]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """What a fixture runs is run by all that share it."""
        self._now = self._run[self._test if request.scope == "function" else request.node.nodeid]
        try:
            return (yield)
        finally:
            self._now = self._run[self._test]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long it took."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write down what was measured."""
        sys.settrace(None)
        run = {
            test: {place for place in map(place_of, codes) if place}
            for test, codes in self._run.items()
            if test
        }
        numbers = {place: number for number, place in enumerate(sorted(set().union(*run.values())))}
        tests = {
            test: (self._seconds[test], [numbers[place] for place in places])
            for test, places in run.items()
        }
        self._file.write_text(json.dumps({"functions": [*numbers], "tests": tests}))


@cache
def place_of(code: CodeType) -> tuple[str, str] | None:
    """The file and the function of what was called; None of what is not of the package."""
    file = Path(code.co_filename)
    if not file.is_relative_to(ROOT / "libra_cli"):
        return None
    return str(file.relative_to(ROOT)), function_at(_tree(file), code.co_firstlineno)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write it."""
    parser.addoption("--reach", type=Path, help="write which tests run which function to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Measure, if asked to."""
    if file := config.getoption("--reach"):
        config.pluginmanager.register(Measure(file))
