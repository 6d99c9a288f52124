"""A known vulnerability fails ``make nightly``; a service that cannot be asked does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.audit import verdict

CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "told", "fails"),
    [
        ([CLEAN, CLEAN], "no known vulnerabilities in 2 of 2 packages", False),
        ([CLEAN, UNKNOWN], "no known vulnerabilities in 1 of 2 packages", False),
        ([UNKNOWN, UNKNOWN, BAD], "b 2: PYSEC-1, mended in 2.1", True),
        ([], "NOT audited: the service knows 0 of 0 packages", False),
        ([UNKNOWN, UNKNOWN], "NOT audited: the service knows 0 of 2 packages", False),
    ],
)
def test_only_a_finding_fails(packages: list[Any], told: str, fails: bool) -> None:
    text, failed = verdict(json.dumps({"dependencies": packages, "fixes": []}), "")
    assert told in text
    assert failed is fails


def test_a_service_out_of_reach_is_told_and_no_failure() -> None:
    assert verdict("", "warning\nConnectionError: no route") == (
        "NOT audited, the service cannot be asked: ConnectionError: no route",
        False,
    )
    assert verdict("", "python: No module named pip_audit")[1]
