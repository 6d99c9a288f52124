"""Counts the inputs that were thrown at a boundary, for the last line of the output."""

from __future__ import annotations

import pytest

from tests.unit.fuzz import nonsense


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if nonsense.COUNTS:
        each = ", ".join(f"{name} {count:,}" for name, count in sorted(nonsense.COUNTS.items()))
        total = sum(nonsense.COUNTS.values())
        terminalreporter.write_line(f"fuzzed inputs: {total:,} ({each})")
