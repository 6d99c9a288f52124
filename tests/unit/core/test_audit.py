"""A known vulnerability fails ``make nightly``; a service that cannot be asked does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.audit import verdict

CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found: c (3)"}


@pytest.mark.parametrize(
    ("packages", "told", "fails"),
    [
        ([CLEAN, CLEAN], "audited 2 of 2 packages; no known vulnerabilities", False),
        (
            [CLEAN, UNKNOWN],
            "audited 1 of 2 packages; not 1, not found (c); no known vulnerabilities",
            False,
        ),
        (
            [UNKNOWN, UNKNOWN, BAD],
            (
                "audited 1 of 3 packages; not 2, not found (c, c)\nknown vulnerabilities:\n"
                "b 2: PYSEC-1, mended in 2.1"
            ),
            True,
        ),
        ([], "audited 0 of 0 packages", False),
        ([UNKNOWN] * 4, "audited 0 of 4 packages; not 4, not found (c, c, c, ...)", False),
    ],
)
def test_only_a_finding_fails(packages: list[Any], told: str, fails: bool) -> None:
    text, failed = verdict(json.dumps({"dependencies": packages, "fixes": []}), "")
    assert text == told
    assert failed is fails


def test_a_service_out_of_reach_is_told_and_no_failure() -> None:
    assert verdict("", "warning\nConnectionError: no route") == (
        "audited 0 packages: pypi.org cannot be asked: ConnectionError: no route",
        False,
    )
    assert verdict("", "python: No module named pip_audit")[1]
