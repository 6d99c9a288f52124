"""``libra bench run`` and the regret certificate, on runs of which it is known what they cost."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.app.what_if import certificate as certificates
from libra_cli.app.what_if import command
from libra_cli.app.what_if.certificate import certify
from libra_cli.app.what_if.command import Changes, what_if
from libra_cli.app.what_if.plans import sized
from libra_cli.app.what_if.reading import WhatIfError, known_of, usual_bound
from libra_cli.app.what_if.trials import Trials
from libra_cli.cli.main import app
from libra_cli.config.recipe import Recipe
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.records import DecisionRecord, NodeRecord, RegretRecord
from libra_cli.report.html.run_report import report_page
from libra_cli.report.status.summary import summary, to_json
from libra_cli.report.status.what_if import WhatIfResult
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.sim.played_run import Pace
from libra_cli.sim.profiles import load_profile
from tests import sample_run, simulated_run

FREE = ("rollout", "hybrid", "hybrid", "train")
OLD_RUN = Path(__file__).parents[2] / "fixtures/0.1.0"


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three trainers and one server, which is what it waits for."""
    recipe = simulated_run.recipe(12, pool=FREE)
    train = ("local/1", "local/2", "local/3")
    return simulated_run.write(tmp_path_factory.mktemp("wrong"), recipe, train=train)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with the split that is the best of the three; the third takes 0.32 s a step."""
    recipe = simulated_run.recipe(12, pool=FREE)
    train = ("local/2", "local/3")
    return simulated_run.write(tmp_path_factory.mktemp("right"), recipe, train=train)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose pools leave no choice."""
    return simulated_run.write(tmp_path_factory.mktemp("plain"), simulated_run.recipe(12))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three resamplings are enough to tell an interval."""
    monkeypatch.setattr(certificates, "SEEDS", 3)
    monkeypatch.setattr(command, "SEEDS", 3)
    monkeypatch.setattr(certificates, "BUDGET_S", 600.0)


def found(run_dir: Path, **changes: Any) -> WhatIfResult:
    return what_if(run_dir, Changes(**changes), lambda text: None)


def kept(run_dir: Path) -> RegretRecord:
    with Reader(run_dir) as reader:
        row = reader.regret()
    assert row is not None
    return row


# -- what would have been --------------------------------------------------------------------------


def test_a_run_as_it_was_is_simulated_nearly_as_it_was_measured(plain: Path) -> None:
    told = found(plain)
    assert abs(told.fidelity.error) < 0.06
    assert [row.name for row in told.rows] == ["measured", "simulated"]
    assert told.rows[1].tokens_per_s == pytest.approx(told.rows[0].tokens_per_s, rel=0.15)
    assert any("reward is not predicted" in note for note in told.notes)


def test_a_bound_of_0_is_predicted_by_turns_at_low_load(plain: Path, tmp_path: Path) -> None:
    """Servers that were nearly always full tell in few turns what they cost when they are not."""
    told = found(plain, bound=0)
    really = simulated_run.write(tmp_path, simulated_run.recipe(12, max_staleness=0))
    came = found(really).rows[0]
    (row,) = [row for row in told.rows if row.name == "--bound 0"]
    assert row.change is not None
    assert row.change_ci is not None
    assert row.step_s == pytest.approx(came.step_s, rel=0.1)
    assert abs(row.change - (came.step_s / told.rows[0].step_s - 1)) < row.change_ci


def test_several_changes_are_told_one_by_one_and_together(wrong: Path) -> None:
    told = found(wrong, planner="fixed", gpus=3)
    names = [row.name for row in told.rows]
    assert names[2:5] == ["--gpus 3", "--planner fixed", "all of these"]
    assert names[5:] == ["a plan that stays"] * 3
    by_name = {row.name: row for row in told.rows}
    assert by_name["--planner fixed"].plan == "rollout=1, train=3"
    assert by_name["--planner fixed"].change == pytest.approx(0, abs=0.01)
    assert by_name["--gpus 3"].plan in (
        "rollout=1, train=2 at first",
        "rollout=2, train=1 at first",
    )


def test_other_gpus_have_their_shipped_prices_and_a_plan_for_as_many(tmp_path: Path) -> None:
    told = simulated_run.recipe(5).model_dump(mode="json")
    told["nodes"] = [{"host": "gpu-0", "gpus": 8, "slots": 8, "pool": "hybrid"}]
    told["model"] = {"path": "/models/Qwen3-14B", "max_len": 512}
    profile = load_profile("a800-qwen3-14b")
    train = ("gpu-0/6", "gpu-0/7")
    simulated_run.write(tmp_path, Recipe.model_validate(told), profile=profile, train=train)
    with Reader(tmp_path) as reader:
        trials = Trials(known_of(reader))
    given = command.changed(trials, Changes(gpus=16, gpu="h100", bound=2))
    assert given.profile.name == "h100-qwen3-14b"
    assert sum(slot.num_devices for slot in given.plans[0].slots) == 16
    assert given.recipe.training.max_staleness == 2
    assert given.profile.surroundings == trials.known.profile.surroundings


@pytest.mark.parametrize("gpus", [0, 8])
def test_what_serves_frozen_models_is_beside_the_gpus_that_are_asked_for(gpus: int) -> None:
    told = simulated_run.recipe(5).model_dump(mode="json")
    pools = [*["auto"] * 6, "models", "models"]
    told["nodes"] = [{"host": "local", "gpus": gpus, "slots": 8, "pool": pools}]
    told["models"] = [{"name": "judge", "path": "/judge", "slots": 2}]
    told["environment"] = [{"name": "m:E", "args": {"judge": {"served": "judge"}}}]
    wanted = Recipe.model_validate(sized(Recipe.model_validate(told).model_dump(mode="json"), 12))
    pools = [pool for node in wanted.nodes for pool in node.slot_pools]
    planned = sum(node.gpus for node in wanted.planned_nodes) or pools.count("auto")
    assert planned == 12
    assert len(frozen_slots(wanted.models, wanted.nodes)) == 2


def test_a_trajectory_under_way_is_told(tmp_path: Path) -> None:
    recipe = simulated_run.recipe(12, staleness={"rule": "cut", "rest": "drop"})
    told = found(simulated_run.write(tmp_path, recipe))
    assert told.censored.trajectories > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"planner": "libra"}, "no slot that may change sides"),
        ({"gpu": "h100"}, "no prices of"),
    ],
)
def test_a_change_that_means_nothing_is_refused(
    plain: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(WhatIfError, match=words) as refused:
        found(plain, **changes)
    assert refused.value.hint


# -- the certificate -------------------------------------------------------------------------------


def test_a_wrong_split_is_what_a_run_lost(wrong: Path, right: Path) -> None:
    certify(wrong)
    row = kept(wrong)
    assert row.regret is not None
    with Reader(wrong) as reader:
        came = Pace.of(reader.steps()).step_s
    with Reader(right) as reader:
        would = Pace.of(reader.steps()).step_s
    assert row.regret == pytest.approx(1 - would / came, abs=0.15)
    assert row.plan == "rollout=2, train=2"
    assert f"lost {100 * row.regret:.0f} %" in row.text
    assert row.error == pytest.approx(0, abs=0.06)
    assert row.plans == 3


def test_a_right_split_lost_nothing(right: Path) -> None:
    certify(right)
    row = kept(right)
    assert row.regret == pytest.approx(0, abs=0.005)
    assert "this run had the best of 3 plans" in row.text


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three trainers: too many for its first 20 steps, just right for the 30 after."""
    train = ("local/1", "local/2", "local/3")
    return simulated_run.write(
        tmp_path_factory.mktemp("drifted"),
        simulated_run.recipe(50, pool=FREE),
        train=train,
        groups=simulated_run.drifting_groups(80),
    )


@pytest.fixture(scope="module")
def lost(drifted: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The share of its time that this run really lost to two trainers, the best of the three."""
    best = simulated_run.write(
        tmp_path_factory.mktemp("best"),
        simulated_run.recipe(50, pool=FREE),
        train=("local/2", "local/3"),
        groups=simulated_run.drifting_groups(80),
    )
    with Reader(drifted) as was, Reader(best) as would:
        return 1 - Pace.of(would.steps()).step_s / Pace.of(was.steps()).step_s


@pytest.mark.parametrize("every", [1, 3])
def test_a_drift_in_the_middle_of_a_run_is_in_its_certificate(
    drifted: Path, lost: float, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Over all of its steps, or a third of them where there is no time for more."""
    with Reader(drifted) as reader:
        turns = reader.turn_count()
    monkeypatch.setattr(certificates, "SEEDS", 1)
    monkeypatch.setattr(certificates, "TURN_S", every * certificates.BUDGET_S / turns / 4)
    row, _ = certificates.certificate(drifted)
    assert row.regret is not None
    assert row.ci95 is not None
    assert lost == pytest.approx(0.28, abs=0.02)
    assert abs(row.regret - lost) < row.ci95
    assert row.regret == pytest.approx(lost, abs=0.1)
    assert row.plan == "rollout=2, train=2"
    assert row.steps == (50 if every == 1 else 17)
    assert ("simulated, 17 of its 50 steps, " in row.text) == (every == 3)


def test_a_difference_below_the_simulators_own_error_is_none(wrong: Path) -> None:
    """Its steps are told with pauses in the middle of the run, of which the simulator knows no
    reason."""
    with Reader(wrong) as reader:
        known = known_of(reader)
    shift, steps = 0.0, []
    for step in known.run.steps:
        shift += 6.0 if 5 <= step.step <= 7 else 0.0
        ended = step.ended_at + shift
        steps.append(dataclasses.replace(step, started_at=ended - 0.1, ended_at=ended))
    paused = dataclasses.replace(known.run, steps=tuple(steps))
    row, _ = certificates.regret_of(Trials(dataclasses.replace(known, run=paused)))
    assert row.regret is not None
    assert row.ci95 is not None
    assert row.ci95 > row.regret > 0
    assert row.text.startswith("no difference seen between this run and the best plan")


def test_status_and_report_read_it_and_simulate_nothing(
    wrong: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(wrong)
    monkeypatch.setattr(Trials, "play", None)
    row = kept(wrong)
    with Reader(wrong) as reader:
        told = json.loads(to_json(summary(reader, now=1e3)))["regret"]
    assert (told["regret"], told["plan"], told["text"]) == (row.regret, row.plan, row.text)
    assert row.text in report_page(wrong, now=1e3)
    printed = CliRunner().invoke(app, ["status", str(wrong)], env={"COLUMNS": "80"}).output
    assert row.text in " ".join(printed.split())


def test_pools_that_leave_no_choice_are_told_without_simulating(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "play", None)
    certify(plain)
    assert "allows one plan alone" in kept(plain).text
    assert kept(plain).regret is None
    assert "hindsight" not in CliRunner().invoke(app, ["status", str(plain)]).output


def test_a_short_run_has_none(tmp_path: Path) -> None:
    recipe = simulated_run.recipe(6, pool=FREE)
    certify(simulated_run.write(tmp_path, recipe))
    assert "of 6 steps, and 10 are needed" in kept(tmp_path).text


def test_a_failure_becomes_a_sentence(wrong: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **more: object) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(certificates, "known_of", fails)
    certify(wrong)
    assert kept(wrong).text == "no regret certificate: ZeroDivisionError: by nought"


def test_without_time_nothing_is_simulated(wrong: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "BUDGET_S", 1e-9)
    monkeypatch.setattr(Trials, "play", None)
    began = time.monotonic()
    certify(wrong)
    assert "too few to simulate" in kept(wrong).text
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("cpus", "slowdowns"), [(2, [0.33, 0.0, 1.0]), (4, [0.0, 0.0, 0.0])])
def test_what_further_ranks_gain_is_open_where_slots_overlap_on_cores(
    wrong: Path, tmp_path: Path, cpus: int, slowdowns: list[float]
) -> None:
    """It has four slots, and trained with three ranks from start to end."""
    run_dir = Path(shutil.copytree(wrong, tmp_path / "run"))
    with Journal(run_dir) as journal:
        facts = json.dumps({"cpus": cpus})
        journal.save(NodeRecord("local", "local", "ready", 0.0, facts, ""))
    with Reader(run_dir) as reader:
        known = known_of(reader)
    profiles = (known.profile, *known.extremes)
    assert [one.surroundings.rank_slowdown for one in profiles] == slowdowns


def test_waits_between_the_parts_of_streamed_steps_are_no_work_beside_servers(
    tmp_path: Path,
) -> None:
    """Whoever takes them for work finds both halves slowed by too little, since neither was."""
    recipe = simulated_run.recipe(24, stream=True, max_staleness=1)
    with Reader(simulated_run.write(tmp_path / "run", recipe)) as reader:
        assert sum(step.between_parts_s for step in reader.steps()) > 0
        found, true = known_of(reader).profile.surroundings, simulated_run.PROFILE.surroundings
    assert found.serving_slowdown == pytest.approx(true.serving_slowdown, rel=0.05)
    assert found.training_slowdown == pytest.approx(true.training_slowdown, rel=0.05)


# -- older runs, and the command -------------------------------------------------------------------


def test_an_old_run_with_few_turns_is_refused_kindly(tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(OLD_RUN, tmp_path / "old"))
    done = CliRunner().invoke(app, ["bench", "run", str(run_dir)])
    assert done.exit_code == 2
    assert "too few to play them again" in " ".join(done.output.split())
    with Reader(run_dir) as reader:
        assert summary(reader, now=1e9).regret is None


def test_a_run_of_before_there_were_certificates_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "BUDGET_S", 2.0)
    sample_run.write_whole(tmp_path)
    certify(tmp_path)
    assert kept(tmp_path).text


def test_the_command_prints_one_object_or_a_table(plain: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "run", str(plain), "--json", "-"])
    told = json.loads(done.stdout)
    assert told["format"] == 1
    assert {"fidelity", "rows", "regret", "censored", "corrections"} <= told.keys()
    shown = CliRunner().invoke(app, ["bench", "run", str(plain)], env={"COLUMNS": "80"}).output
    assert max(map(len, shown.splitlines())) <= 80
    assert "rollout=1, train=1" in shown


def test_rules_of_a_recipe_hold_for_what_is_asked(plain: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "run", str(plain), "--rule", "nope"])
    assert done.exit_code == 2
    assert "no rule 'nope'" in done.output


def test_a_run_that_chose_its_bound_is_played_at_the_one_that_most_steps_had() -> None:
    steps = [sample_run.step_record(n, 10.0 * n) for n in range(1, 9)]
    looks = [(25.0, 1), (35.0, 2), (75.0, 4)]
    rows = [DecisionRecord(at, 0, "", None, "", 1.0, 1.0, bound=bound) for at, bound in looks]
    assert usual_bound(1, rows, steps) == 2
    assert usual_bound(1, [], steps) == 1
