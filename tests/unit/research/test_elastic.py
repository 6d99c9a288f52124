"""What ``tests.research.elastic`` makes of runs that are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

from libra_cli.config.recipe import Recipe
from tests.research import elastic
from tests.sample_run import write, write_moving


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The three runs of a seed, of which one has moves."""
    for arm in elastic.ARMS:
        make = write_moving if arm == "moves" else write
        make(tmp_path / f"{arm}-0" / "runs" / "run-1")
    return tmp_path


def test_arms_are_one_recipe_but_for_who_moves() -> None:
    moves, stays, other = (elastic.recipe_of(elastic.RECIPE, arm, 3) for arm in elastic.ARMS)
    recipes = [Recipe.model_validate(one) for one in (moves, stays, other)]
    assert [one.planner.kind for one in recipes] == ["libra", "fixed", "fixed"]
    assert [one.nodes[0].slot_pools[1] for one in recipes] == ["hybrid", "hybrid", "train"]
    assert {one.run.seed for one in recipes} == {3}
    alike = {one.model_dump_json(exclude={"nodes", "planner", "run"}) for one in recipes}
    assert len(alike) == 1


def test_a_move_is_compared_with_the_same_steps_of_the_run_that_stayed(out: Path) -> None:
    runs = {arm: elastic.finished(out / f"{arm}-0") for arm in elastic.ARMS}
    found = {arm: run for arm, run in runs.items() if run is not None}
    assert found.keys() == elastic.ARMS.keys()
    there, back = elastic.moves_of(found)
    assert (there.to, back.to) == ("gradient", "rollout")
    run = found["moves"]
    arrived = next(move.ended_at for move in run.moves if move.to_role == "gradient")
    assert arrived is not None
    asked = next(move.started_at for move in run.moves if move.to_role == "rollout")
    ends = {step.step: step.ended_at for step in run.steps}
    within = [step for step, end in ends.items() if arrived < end <= asked][1:][: elastic.AFTER]
    assert there.after_s == pytest.approx(fmean(ends[step] - ends[step - 1] for step in within))
    kept = {step.step: step.ended_at for step in found["stays"].steps}
    assert there.kept_s == pytest.approx(fmean(kept[step] - kept[step - 1] for step in within))


def test_runs_that_are_there_are_told_and_drawn_and_not_done_again(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a finished run was done again")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(sys, "argv", ["elastic", "--seeds", "0", "--out", str(out)])
    elastic.main()
    told = capsys.readouterr().out
    assert all(f"| {arm} | 1 | " in told for arm in elastic.ARMS)
    assert "| gradient | 1 | " in told
    drawn = ElementTree.parse(out / "elastic.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}svg")) == 1 + len(elastic.ARMS)
