"""What ``libra rebalance`` explains is true of the run, reads in 80 columns, and refuses kindly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.app import rebalance
from libra_cli.app.first_plan import expected_work, explained_first_plan
from libra_cli.app.rebalance.cases import case_of_run
from libra_cli.cli.main import app
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import LengthsSpec, NodeSpec, PlannerSpec, Recipe
from libra_cli.core import records as r
from libra_cli.core.costs.profile import NothingFits, ProfileError
from libra_cli.core.json_form import shown
from libra_cli.core.workload import TrajectorySample
from libra_cli.report.status.rebalance import RebalanceResult, SlotMoveTold, StageTimes
from libra_cli.report.terminal.rebalance import rebalance_view
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from tests import sample_run
from tests.unit.report.test_console import drawn, widest

CHECKOUT = Path(__file__).parents[3]
QUICKSTART = CHECKOUT / "recipes/quickstart.yaml"
PROFILE = "a800-qwen3-14b"
GPU_STEP_S = 60.0


def libra(*arguments: str):
    return CliRunner().invoke(app, ["rebalance", *arguments])


def sample_recipe(**node: Any) -> Recipe:
    """Of the sample run: three slots on one host without GPUs."""
    return Recipe.model_validate(
        {
            "run": {"name": "quickstart", "steps": sample_run.STEPS},
            "nodes": [{"host": "local", "slots": 3, **node}],
            "model": {"build": {"task": "pointer-chase"}},
            "rollout": {"buckets": [{"name": "short", "max_num_seqs": 48}]},
        }
    )


def gpu_recipe(nodes: int = 3, **model: Any) -> Recipe:
    """Hosts with two slots of four GPUs each."""
    hosts = [{"host": f"n{index}", "gpus": 8, "slots": 2} for index in range(nodes)]
    return Recipe.model_validate(
        {
            "run": {"name": "big", "steps": 100},
            "nodes": hosts,
            "model": {"path": "/models/Qwen3-14B", "max_len": 8192, **model},
            "rollout": {"buckets": [{"name": "all", "tensor_parallel": 4, "max_num_seqs": 64}]},
            "training": {"groups_per_step": 32, "micro_batch_tokens": 8192},
        }
    )


def write_recipe(run_dir: Path, recipe: Recipe) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.json").write_text(recipe.model_dump_json())
    return run_dir


def sample(tmp_path: Path, **node: Any) -> Path:
    """The sample run, as ``libra run`` leaves it."""
    return sample_run.write(write_recipe(tmp_path / "run", sample_recipe(**node)))


def gpu_run(run_dir: Path, gpu: str = "NVIDIA A800-SXM4-80GB", **model: Any) -> Path:
    """A run on GPUs, of ten steps in which training took all the time."""
    write_recipe(run_dir, gpu_recipe(**model))
    with Journal(run_dir) as journal:
        for record in gpu_records(gpu):
            journal.save(record)
    return run_dir


def gpu_records(gpu: str) -> Iterator[r.Record]:
    start = sample_run.START
    yield sample_run.run_record("finished", step=10, ended_at=start + 11 * GPU_STEP_S)
    facts = json.dumps({"gpus": [{"index": index, "name": gpu} for index in range(8)]})
    slots = [f"n{node}/{half}" for node in range(1, 3) for half in (0, 1)]
    servers = [[slot, "all", 4, 64, 8192] for slot in slots]
    train = ["n0/0", "n0/1"]
    yield r.PlanRecord(0, start, json.dumps(servers), json.dumps(train), '["a third"]')
    for node in range(3):
        yield r.NodeRecord(f"n{node}", f"n{node}", "released", start, facts, "")
    for step in range(1, 11):
        ended = start + (step + 1) * GPU_STEP_S
        yield sample_run.step_record(
            step, ended, started_at=ended - GPU_STEP_S, waited_s=0.0, context_tokens=600_000
        )
        yield from turns_of_step(step, slots, ended - GPU_STEP_S)


def turns_of_step(step: int, slots: list[str], began: float) -> Iterator[r.Record]:
    for member, slot in enumerate(slots):
        yield r.TrajectoryRecord(
            step, member, 0, "finished", began, began + 30, 1.0, 2, 1500, 2600, 0, 0, "[]", ""
        )
        for turn, (prompt, generated) in enumerate(((600, 700), (1800, 800))):
            at = began + turn * 15
            yield r.TurnRecord(
                group_id=step,
                member=member,
                attempt=0,
                turn=turn,
                slot=slot,
                incarnation=1,
                queued_at=at,
                started_at=at,
                ended_at=at + 12,
                prompt_tokens=prompt,
                generated_tokens=generated,
                finish_reason="stop",
                moved_from="",
                tools_json='[["run", "ok", 1.5, 10]]',
            )


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def big_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_run(tmp_path_factory.mktemp("gpu") / "run")


@cache
def explained(run_dir: Path, profile: str | None = None) -> RebalanceResult:
    """Of a run that no test changes."""
    return rebalance.explain(run_dir, trace=None, profile=profile)


# -- a run ---------------------------------------------------------------------------------------


def test_a_run_without_a_profile_is_priced_by_what_it_did(cpu_run: Path) -> None:
    told = explained(cpu_run)
    assert told.profile.source == "this run"
    assert told.profile.gpu == "CPU"
    assert told.workload.trajectories == 128
    assert [server.slot for server in told.plan.servers] == list(sample_run.SERVERS)
    assert told.plan.train == [sample_run.TRAINER]
    assert any("memory is not known" in note for note in told.notes)


def test_that_environments_are_the_bottleneck_is_the_first_note(tmp_path: Path) -> None:
    run_dir = sample(tmp_path)
    with Reader(run_dir) as reader:
        newest = [row for row in reader.rows(r.TrajectoryRecord) if row.state == "finished"]
    with Journal(run_dir) as journal:
        for row in newest:
            journal.save(replace(row, environment_s=100.0, waited_s=90.0))
    note, *_ = rebalance.explain(run_dir, trace=None, profile=None).notes
    assert note.startswith("environments are the bottleneck: of a trajectory's 10")
    assert "raise environment.concurrency" in note


def test_measured_times_are_those_of_as_many_steps_as_the_planner_averages(cpu_run: Path) -> None:
    with Reader(cpu_run) as reader:
        steps = reader.steps()[-4:]  # max_staleness is 1
    measured = explained(cpu_run).times.measured
    worked = sum(step.ended_at - step.started_at for step in steps) / 4
    assert measured.train_s == pytest.approx(worked)
    assert measured.step_s is not None
    assert measured.step_s > worked
    # Training waited in every step of this run, so rollout took all of each, but for what it
    # played in the last ones for the next.
    assert measured.rollout_s == pytest.approx(measured.step_s, rel=0.02)


def test_a_rollout_that_was_held_back_is_told_by_how_long_trajectories_took(big_run: Path) -> None:
    """Four trajectories of thirty seconds in every step, and training never waited."""
    told = explained(big_run)
    seats = sum(server.max_num_seqs for server in told.plan.servers)
    measured = told.times.measured
    assert measured.rollout_s is not None
    assert measured.step_s is not None
    # With more beside it no trajectory is faster; with all seats taken a step ends no sooner.
    assert 4 * 30 / seats <= measured.rollout_s < measured.step_s


def test_trajectories_in_play_are_counted_in_a_time_and_not_beyond(cpu_run: Path) -> None:
    with Reader(cpu_run) as reader:
        steps = reader.steps()[-10:]
        since, until = steps[0].started_at - steps[0].waited_s, steps[-1].ended_at
        rows = reader.rows(r.TrajectoryRecord)
        spans = [(row.started_at, row.ended_at or until) for row in rows]
        inside = [(began, ended) for began, ended in spans if began < until and ended > since]
        assert sorted(reader.in_play(since, until)) == sorted(inside)


def test_corrected_predictions_of_the_plan_now_come_near_what_was_measured(cpu_run: Path) -> None:
    times = explained(cpu_run).times
    now, measured = times.now, times.measured
    assert now.train_s == pytest.approx(measured.train_s, rel=0.25)
    # Training waited in this run, so rollout took all of a step.
    assert now.rollout_s == pytest.approx(measured.step_s, rel=0.25)


def test_pools_that_fix_every_slot_are_given_as_the_reason_to_stay(tmp_path: Path) -> None:
    told = explained(sample(tmp_path, pool=["rollout", "rollout", "train"]))
    assert told.verdict.move is False
    assert "no slot may change sides" in told.verdict.why_not


def test_a_run_on_known_gpus_gets_the_shipped_prices_of_its_model(big_run: Path) -> None:
    told = explained(big_run)
    assert (told.profile.name, told.profile.source) == (PROFILE, "shipped")


def test_a_run_on_unknown_gpus_gets_its_own_prices(tmp_path: Path) -> None:
    told = explained(gpu_run(tmp_path / "run", gpu="NVIDIA B200"))
    assert told.profile.source == "this run"
    assert told.profile.gpu == "NVIDIA B200"


def test_a_slow_half_gets_slots_and_every_number_of_the_verdict_agrees(big_run: Path) -> None:
    told = explained(big_run)
    assert len(told.proposed.train) > len(told.plan.train)
    moved = {move.slot for move in told.moves}
    assert moved == set(told.proposed.train) ^ set(told.plan.train)
    verdict, times = told.verdict, told.times
    assert verdict.move
    assert verdict.gain_s is not None
    assert verdict.gain_s == pytest.approx((times.now.step_s or 0) - (times.proposed.step_s or 0))
    assert verdict.payback_steps is not None
    assert verdict.payback_steps == pytest.approx(verdict.cost_s / verdict.gain_s)
    assert verdict.payback_steps < (verdict.horizon_steps or 0)


def test_a_profile_of_another_gpu_is_refused_with_both_names(big_run: Path, cpu_run: Path) -> None:
    with pytest.raises(ProfileError, match=r"H100.*A800"):
        explained(big_run, "h100-qwen3-14b")
    with pytest.raises(ProfileError, match=r"A800.*no GPUs"):
        explained(cpu_run, PROFILE)


def test_prices_measured_on_hosts_without_gpus_are_taken_there(
    tmp_path: Path, cpu_run: Path
) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(case_of_run(cpu_run, None).profile.to_json())
    told = explained(cpu_run, str(path))
    assert told.profile.source == "given"
    assert not any("you must know" in note for note in told.notes)
    with pytest.raises(ProfileError, match=r"CPU.*A800"):
        explained(gpu_run(tmp_path / "run"), str(path))


def test_a_profile_of_another_model_is_used_and_told(tmp_path: Path) -> None:
    told = explained(gpu_run(tmp_path / "run", path="/models/mine"), PROFILE)
    assert any("Qwen3-14B" in note and "/models/mine" in note for note in told.notes)


def test_a_plan_with_a_shape_without_prices_is_refused(tmp_path: Path, big_run: Path) -> None:
    path = tmp_path / "narrow.json"
    profile = case_of_run(big_run, PROFILE).profile
    path.write_text(replace(profile, servers={1: profile.servers[1]}).to_json())
    with pytest.raises(ProfileError, match=r"'all' has servers of 4 GPUs.*it has 1"):
        explained(big_run, str(path))


def test_a_run_that_has_finished_nothing_says_when_to_come_back(tmp_path: Path) -> None:
    write_recipe(tmp_path / "run", sample_recipe())
    with Journal(tmp_path / "run") as journal:
        journal.save(sample_run.run_record())
    with pytest.raises(StateError, match="no trajectory has finished") as caught:
        explained(tmp_path / "run")
    assert "try again later" in caught.value.hint


def test_prompt_answers_and_tools_of_a_trajectory_are_told_apart(big_run: Path) -> None:
    with Reader(big_run) as reader:
        samples = reader.played(3)
    assert (
        samples
        == [TrajectorySample(prompt=600, generated=1500, observed=500, turns=2, tool_s=4.5)] * 3
    )


# -- a recipe ------------------------------------------------------------------------------------


def recipe_file(tmp_path: Path, recipe: Recipe) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.model_dump_json())
    return path


def test_a_recipe_is_explained_before_anything_has_run(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, gpu_recipe())
    told = rebalance.explain(path, trace="mint", profile=PROFILE)
    assert told.of == "recipe"
    assert told.step is None
    assert told.times.measured == StageTimes(None, None, None)
    assert told.verdict.cost_s == 0.0
    assert "mint" in told.workload.source


LENGTHS = LengthsSpec(generated=700, turns=3, tool_s=2.0)


@pytest.mark.parametrize(
    "planner", [{"lengths": LENGTHS}, {"trace": "mint"}, {}], ids=["lengths", "trace", "guess"]
)
def test_a_recipe_is_judged_by_the_work_that_its_run_is_planned_with(
    planner: dict[str, Any], tmp_path: Path
) -> None:
    spec = PlannerSpec(profile=PROFILE, **planner)
    recipe = gpu_recipe().model_copy(update={"planner": spec})
    begun = explained_first_plan(recipe).explanation
    told = rebalance.explain(recipe_file(tmp_path, recipe), trace=None, profile=None)
    assert begun is not None
    assert (told.times.now.rollout_s, told.times.now.train_s) == pytest.approx(
        (begun.chosen.rollout_s, begun.chosen.train_s)
    )
    assert told.workload.seen == len(expected_work(recipe)[0])


def test_gpus_that_train_under_the_plan_proposed_are_counted_on_its_own_slots(
    tmp_path: Path,
) -> None:
    nodes = [NodeSpec(host=f"n{index}", gpus=8) for index in range(3)]
    rollout = gpu_recipe().rollout.model_copy(update={"buckets": None})
    recipe = gpu_recipe().model_copy(update={"nodes": tuple(nodes), "rollout": rollout})
    told = rebalance.explain(recipe_file(tmp_path, recipe), trace="mint", profile=PROFILE)
    proposed, explained = told.proposed, told.explanation
    assert explained is not None
    assert explained.move
    assert not {*proposed.train, *proposed.gradient} <= {*told.plan.train, *told.plan.gradient}
    assert explained.chosen.layout.endswith(f"training {proposed.training_gpus}")
    assert proposed.training_gpus > 8
    slots = len(proposed.train) + len(proposed.gradient)
    shown_plans = drawn(rebalance_view(told), width=80)
    assert f"{slots} slots, {proposed.training_gpus} ranks" in shown_plans


def test_trajectories_beyond_max_len_are_cut_as_a_run_would(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, gpu_recipe(max_len=1024))
    told = rebalance.explain(path, trace="tau2bench", profile=PROFILE)
    assert told.workload.longest_context == 1024
    assert any("longer than model.max_len 1,024" in note for note in told.notes)


def test_a_recipe_needs_a_named_profile_and_lists_those_of_its_model(tmp_path: Path) -> None:
    with pytest.raises(LibraError, match="which GPUs") as caught:
        rebalance.explain(recipe_file(tmp_path, gpu_recipe()), trace=None, profile=None)
    assert PROFILE in caught.value.hint
    assert "32b" not in caught.value.hint


def test_a_recipe_without_gpus_is_sent_to_run_first() -> None:
    for profile in (None, PROFILE):
        with pytest.raises(LibraError, match="GPUs") as caught:
            rebalance.explain(QUICKSTART, trace=None, profile=profile)
        assert "libra run" in caught.value.hint


def test_too_few_gpus_name_what_fails_first(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, gpu_recipe(1, path="/models/Qwen3-32B"))
    with pytest.raises(NothingFits) as caught:
        rebalance.explain(path, trace="mint", profile="a800-qwen3-32b")
    assert caught.value.constraint in ("trainer memory", "GPUs")


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_tables_fit_80_columns(
    tmp_path: Path, cpu_run: Path, big_run: Path, encoding: str
) -> None:
    path = recipe_file(tmp_path, gpu_recipe())
    tolds = [
        explained(cpu_run),
        explained(big_run),
        rebalance.explain(path, trace="mint", profile=PROFILE),
    ]
    for told in tolds:
        text = drawn(rebalance_view(told), encoding=encoding)
        assert widest(text) <= 80
        assert "verdict" in text


def test_many_moves_and_long_names_keep_the_tables_whole(big_run: Path) -> None:
    told = explained(big_run)
    slot = "gpu-with-a-very-long-name.rack.example.org/7"
    moves = [SlotMoveTold(slot, "a-very-long-bucket-name", "train", 3600.0)]
    many = replace(told, moves=moves * 40, name="x" * 100)
    text = drawn(rebalance_view(many))
    assert widest(text) <= 80
    assert "and 28 more" in text


def test_json_is_one_object_of_finite_numbers(cpu_run: Path) -> None:
    done = libra(str(cpu_run), "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert set(told) == shown(RebalanceResult).keys()


def test_an_order_to_a_run_that_has_ended_or_to_a_recipe_is_refused(cpu_run: Path) -> None:
    done = libra(str(cpu_run), "--to", "rollout=1")
    assert done.exit_code == 2
    assert "not running any more" in done.output
    recipe = libra(str(QUICKSTART), "--to", "rollout=1")
    assert recipe.exit_code == 2
    assert "only a live run can move slots" in recipe.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--to", "serve=2"),
            "'serve' is no role, and no model that the run serves; there are rollout",
        ),
        (("--to", "rollout=many"), "'many' is not a number of slots"),
        (("--to", "rollout"), "'rollout' is not NAME=VALUE"),
        (("--pin", "a/0=idle"), "'idle' is no role"),
        (("--json",), "--json is for explaining"),
    ],
)
def test_an_order_that_cannot_be_read_says_what_is_wrong(
    cpu_run: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = libra(str(cpu_run), *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    "ordered",
    [("--to", "rollout=1"), ("--pin", "a/0=train"), ("--join", "a/0+1"), ("--split", "a/0+1")],
)
def test_an_order_is_not_dropped_where_nothing_is_to_be_moved(
    cpu_run: Path, ordered: tuple[str, str]
) -> None:
    done = libra(str(cpu_run), "--dry-run", *ordered)
    assert done.exit_code == 2
    assert f"{ordered[0]} is an order, and with --dry-run nothing is moved" in " ".join(
        done.output.split()
    )


def test_a_trace_with_a_run_or_a_wrong_path_is_refused(tmp_path: Path) -> None:
    assert "--trace is for a recipe" in libra(str(tmp_path), "--dry-run", "--trace", "mint").output
    assert "there is no" in libra(str(tmp_path / "no"), "--dry-run").output
    assert libra(str(tmp_path / "no"), "--dry-run").exit_code == 2


def test_an_order_changes_what_slots_do_or_how_large_they_are(tmp_path: Path) -> None:
    run_dir = sample_run.write(tmp_path / "run")
    done = libra(str(run_dir), "--join", "gpu-01/0+1", "--to", "rollout=2")
    assert done.exit_code == 2
    assert "--join and --split change the size of servers" in done.output
