"""What ``libra doctor`` shows."""

from __future__ import annotations

import io

from rich.console import Console

from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.report.terminal.findings import findings_view

FINDINGS = [
    Finding("reach", ALL, "fine", "2 answer, Python 3.12.3"),
    Finding("clock", "gpu-02", "warns", "[red]odd[/] words", "why " * 40),
    Finding(
        "model", "gpu-01", "stops", "there is no /m", "why", Remedy("here", "libra setup r.yaml")
    ),
]


def shown(findings: list[Finding]) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(findings_view(findings, seconds=2.0))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_every_finding_is_told_with_why_and_what_mends_it_the_worst_first():
    text = shown(FINDINGS)
    assert text.index("gpu-01: there is no /m") < text.index("gpu-02: [red]odd[/] words")
    assert "here: libra setup r.yaml" in text
    assert "1 checks fine, 1 warnings, 1 that stop a run (2.0 s)" in text


def test_what_was_not_looked_at_is_neither_fine_nor_named_below():
    text = shown([Finding("gpus", ALL, "unknown", "not looked at on gpu-02")])
    assert text.splitlines()[0].split(maxsplit=2) == ["?", "gpus", "not looked at on gpu-02"]
    assert "0 checks fine, 1 not made on all hosts, 0 warnings" in text
    assert text.count("gpu-02") == 1


def test_it_fits_eighty_columns():
    assert max(map(len, shown(FINDINGS).splitlines())) <= 80


def test_a_check_that_found_something_names_the_hosts_in_the_table():
    lines = shown(FINDINGS).splitlines()
    assert lines[1].split() == ["!", "clock", "gpu-02"]
