"""A row has the names that ``libra help monitors`` promises, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import libra_cli
from libra_cli import api
from libra_cli.core.json_form import shown

PAGE = Path(libra_cli.__file__).parent / "help" / "monitors.md"
ROWS: dict[str, list[type]] = {
    "steps": [api.StepRow],
    "trajectories": [api.TrajectoryRow],
    "turns": [api.TurnRow, api.ToolRow],
    "moves": [api.MoveRow, api.PhaseRow],
    "evaluations": [api.EvaluationRow],
}


@pytest.mark.parametrize("table", ROWS)
def test_the_page_names_every_name_of_a_row(table: str) -> None:
    (told,) = re.findall(rf"^\| `run\.{table}` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    named = set(re.findall(r"`([a-z_]+)`", told))
    assert named == set().union(*(shown(kind) for kind in ROWS[table]))


def test_names_of_older_libras_are_kept() -> None:
    phase = api.PhaseRow("drain", 1.0, 2.0)
    assert (phase.began, phase.ended) == (phase.started_at, phase.ended_at) == (1.0, 2.0)
    assert {"group_id", "group"} <= shown(api.TurnRow).keys() & shown(api.TrajectoryRow).keys()
