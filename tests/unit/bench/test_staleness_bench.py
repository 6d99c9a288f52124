"""``libra bench staleness``: every rule on the same groups, with what it costs beside its speed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner, Result

from libra_cli.bench import staleness as bench
from libra_cli.cli.main import app


def libra(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", "staleness", *arguments])


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of twenty trajectories, two take twenty times as long as the others; runs in this process."""
    monkeypatch.setattr(bench, "simulated", lambda run, jobs, progress: map(run, jobs))
    random = Random(1)
    lines = []
    for number in range(60):
        turns = 20 if random.random() < 0.1 else 1
        turn = {"prompt_tokens": 100, "gen_tokens": 40, "tool": "search", "tool_ok": True}
        made = [{**turn, "prompt_tokens": 100 + 50 * at} for at in range(turns)]
        lines.append({"task": f"task {number % 6}", "turns": made})
    path = tmp_path / "tailed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_every_rule_is_shown_with_its_price(trace: str, tmp_path: Path) -> None:
    asked = ("--trace", trace, "--gpus", "16", "--steps", "4", "--seeds", "1", "--bounds", "1")
    file = tmp_path / "told.json"
    rules = ("hold", "late-1", "cut", "cut-drop")
    done = libra(*asked, "--rules", ",".join(rules), "--drift", "none", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert all(f" {name} " in done.output for name in rules)
    told = json.loads(file.read_text())["staleness"]
    assert len(told) == len(rules)
    for row in told:
        ends = row["longest_trained"] + row["longest_later"] + row["longest_lost"]
        assert ends == pytest.approx(1.0)
        assert (row["rule"] == "hold") <= (row["over_bound"] == 0.0 and row["age_max"] <= 1)
        assert (row["rule"] == "late-1") <= (row["age_max"] <= 2)
        assert (row["longest_lost"] > 0) <= (row["rule"] == "cut-drop")
    assert any(row["closed"] > 0 for row in told if row["rule"] == "cut")
    assert any(row["longest_lost"] > 0 for row in told if row["rule"] == "cut-drop")


def test_a_bound_that_is_no_number_is_refused() -> None:
    done = libra("--bounds", "one")
    assert done.exit_code == 2
    assert "--bounds 1,2,4" in done.output


def test_an_unknown_rule_is_told_with_those_there_are() -> None:
    done = libra("--rules", "softt")
    assert done.exit_code == 2
    assert "did you mean 'soft'?" in done.output
