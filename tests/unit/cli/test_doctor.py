"""What ``libra doctor --fix`` prints, beside hosts that are only told of."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from libra_cli.app import hosts
from libra_cli.cli.main import app
from libra_cli.config.errors import ExitCode
from libra_cli.core.preflight.findings import Finding, Severity


@pytest.mark.parametrize("mended", [["a: installed"], []])
def test_findings_as_json_are_one_list_whatever_was_mended(
    monkeypatch: pytest.MonkeyPatch, mended: list[str]
) -> None:
    looked: list[Severity] = []

    def examined(recipe: object, **more: object) -> list[Finding]:
        looked.append("fine" if looked else "stops")
        return [Finding("environment", "a", looked[-1], "packages")]

    monkeypatch.setattr(hosts, "doctor", examined)
    monkeypatch.setattr(hosts, "mend", lambda *asked: mended)
    done = CliRunner().invoke(app, ["doctor", "recipe.yaml", "--fix", "--json"])
    assert [one["severity"] for one in json.loads(done.stdout)] == [looked[-1]]
    assert len(looked) == 1 + len(mended)
    assert done.exit_code == (ExitCode.FINISHED if mended else ExitCode.HOST_PROBLEM)
