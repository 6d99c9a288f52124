"""A run that goes on begins with the plan it had; where it cannot, it says why."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from libra_cli.app import resume, run
from libra_cli.app.first_plan import explained_first_plan
from libra_cli.cli.main import app
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core import events as e
from libra_cli.core.actions import Save
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.planning.planner import FirstPlan
from libra_cli.core.records import MoveRecord, PlanRecord, Record, RunRecord
from libra_cli.core.run.state import Resume, RunIdentity
from libra_cli.core.types import Plan
from libra_cli.runtime.new_run import Planning
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import records_in_order
from libra_cli.runtime.store.run_directory import keep_recipe, recipe_of
from libra_cli.runtime.tasks.digests import keep_tasks
from tests import elastic, sample_run
from tests.unit.core.reconcile import test_joined_slots as joined_slots
from tests.unit.core.reconcile.test_joined_slots import BOTH, shape
from tests.world import machine_of

OLD_RUN = Path(__file__).parents[2] / "fixtures/0.1.0"
A800 = frozenset({"NVIDIA A800-SXM4-80GB"})
IDENTITY = RunIdentity("run", "", 1, 1.0)


def kept(run_dir: Path, recipe: Recipe, records: Iterable[Record]) -> Path:
    """The run directory of such a run."""
    run_dir.mkdir()
    keep_recipe(recipe, run_dir)
    with Journal(run_dir) as journal:
        for record in records:
            journal.save(record)
    return run_dir


def begun(recipe: Recipe, run_dir: Path, gpus: frozenset[str] = frozenset()) -> FirstPlan:
    return resume.plan_to_go_on_with(recipe, run_dir)(gpus)


@dataclass
class Resumed(elastic.Scene):
    """A world that goes on with a plan."""

    begin: FirstPlan | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.begin is not None
        self.plan, self._slots = self.begin.plan, self.begin.slots
        self.machine = machine_of(self.recipe, self.plan, self._slots, IDENTITY, resume=self.resume)


def resumed(world: elastic.Scene, run_dir: Path) -> Resumed:
    """The world as it goes on, until every server and every worker of its plan is there."""
    machine, recipe = world.machine, world.recipe
    position = machine.ledger.position(machine.training.step)
    with Reader(run_dir) as reader:
        going_on = Resume("checkpoint", position, 0, records_in_order(reader))
    again = Resumed(
        Random(1),
        recipe=recipe,
        resume=going_on,
        begin=begun(recipe, run_dir),
        ledgers={"checkpoint": position},
    )
    again.later(e.RunStarted())
    servers, workers = again.machine.servers.replicas, again.machine.workers.replicas
    serving = {slot for slot, _ in again.plan.servers}
    again.until(lambda: all(servers[slot].state is ReplicaState.SERVING for slot in serving))
    again.until(lambda: set(workers) == set(again.plan.gradient))
    again.steps_on(2)
    return again


def test_a_slot_that_became_a_gradient_worker_is_one_after_a_resume(tmp_path: Path) -> None:
    world = elastic.scene()
    before = world.machine.plan
    world.order(rollout=2)
    world.arrive()
    assert world.machine.plan.gradient
    run_dir = kept(tmp_path / "run", world.recipe, world.records)
    again = resumed(world, run_dir)
    plan = again.machine.plan
    assert (plan.servers, plan.train, plan.gradient) != (before.servers, before.train, ())
    assert replace(plan, reasons=()) == replace(world.machine.plan, reasons=())
    first = again.rows(PlanRecord)[0]
    assert (first.plan, first.cause) == (2, "start")
    assert "goes on with plan 1" in first.reasons_json
    assert not again.rows(MoveRecord), "nothing had to move"


def test_joined_slots_stay_joined_after_a_resume(tmp_path: Path) -> None:
    world = joined_slots.scene(pool="rollout")
    shape(world, joined=True)
    world.arrive()
    run_dir = kept(tmp_path / "run", world.recipe, world.records)
    again = resumed(world, run_dir)
    assert [slot.id for slot in again.machine.reconciler.slots] == ["c/0", "a/0", "a/1", BOTH]
    assert again.machine.servers.replicas[BOTH].slot.gpus == (0, 1)
    assert not again.rows(MoveRecord)
    shape(again, joined=False)
    again.arrive()
    assert {"b/0", "b/1"} <= joined_slots.serving(again), "and can be split"


def test_a_run_that_goes_on_twice_says_once_with_which_plan(tmp_path: Path) -> None:
    world = elastic.scene()
    run_dir = kept(tmp_path / "run", world.recipe, world.records)
    again = resumed(world, run_dir)
    run_dir = kept(tmp_path / "again", world.recipe, [*world.records, *again.records])
    reasons = begun(world.recipe, run_dir).plan.reasons
    assert [why for why in reasons if why.startswith(resume.GOES_ON)] == [
        "goes on with plan 1, the last before the run was resumed"
    ]


def open_nodes(**lengths: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "nodes": [{"host": f"gpu-{n}", "gpus": 8} for n in range(6)],
            "model": {"path": "/models/Qwen3-14B", "max_len": 32_768},
            "training": {"groups_per_step": 32, "micro_batch_tokens": 32_768},
            "planner": {"profile": "a800-qwen3-14b", "lengths": lengths},
        }
    )


def test_nodes_without_slots_are_cut_up_after_a_resume_as_they_were(tmp_path: Path) -> None:
    recipe = open_nodes(generated=9000, turns=6, tool_s=2.0)
    had = explained_first_plan(recipe, A800)
    machine = machine_of(recipe, had.plan, had.slots, IDENTITY)
    done = machine.handle(e.RunStarted(), now=1.0)
    rows = [action.record for action in done if isinstance(action, Save)]
    run_dir = kept(tmp_path / "run", recipe, rows)
    told_other = open_nodes(generated=300, turns=2)
    begin = begun(told_other, run_dir, A800)
    assert explained_first_plan(told_other, A800).slots != had.slots
    assert set(begin.slots) == set(had.slots)
    assert replace(begin.plan, reasons=()) == replace(had.plan, reasons=())
    assert begin.plan.reasons[1:] == had.plan.reasons


def test_without_the_rows_of_its_slots_a_plan_is_made_anew_and_says_so(tmp_path: Path) -> None:
    recipe = open_nodes(generated=9000, turns=6, tool_s=2.0)
    had = explained_first_plan(recipe, A800)
    machine = machine_of(recipe, had.plan, had.slots, IDENTITY)
    done = machine.handle(e.RunStarted(), now=1.0)
    plans = [action.record for action in done if isinstance(action, Save)]
    plans = [row for row in plans if isinstance(row, PlanRecord)]
    recipe = open_nodes(generated=300, turns=2)
    begin = begun(recipe, kept(tmp_path / "run", recipe, plans), A800)
    assert begin.plan.servers == explained_first_plan(recipe, A800).plan.servers
    assert "nothing tells what its slot 'gpu-" in begin.plan.reasons[0]


def test_other_buckets_make_another_plan_and_it_says_why(tmp_path: Path) -> None:
    world = elastic.scene()
    run_dir = kept(tmp_path / "run", world.recipe, world.records)
    rollout = world.recipe.model_dump()["rollout"] | {"buckets": [{"max_num_seqs": 77}]}
    other = Recipe.model_validate(world.recipe.model_dump() | {"rollout": rollout})
    plan = begun(other, run_dir).plan
    assert {bucket.max_num_seqs for _, bucket in plan.servers} == {77}
    assert plan.reasons[0] == (
        "made anew, not the plan the run had before it was resumed: rollout.buckets changed since "
        "plan 0"
    )


def test_other_shapes_make_another_plan_and_it_says_why(tmp_path: Path) -> None:
    recipe = open_nodes(generated=300, turns=2)
    had = explained_first_plan(recipe, A800)
    done = machine_of(recipe, had.plan, had.slots, IDENTITY).handle(e.RunStarted(), now=1.0)
    saved = [action.record for action in done if isinstance(action, Save)]
    run_dir = kept(tmp_path / "run", recipe, saved)
    assert begun(recipe, run_dir, A800).plan.servers == had.plan.servers
    rollout = recipe.model_dump()["rollout"] | {"shapes": "mixed"}
    other = Recipe.model_validate(recipe.model_dump() | {"rollout": rollout})
    plan = begun(other, run_dir, A800).plan
    assert len({bucket.tensor_parallel for _, bucket in plan.servers}) > 1
    assert plan.reasons[0].endswith("resumed: rollout.shapes changed since plan 0")


def test_a_run_that_was_killed_before_its_first_plan_makes_one(tmp_path: Path) -> None:
    recipe = elastic.scene().recipe
    run_dir = kept(tmp_path / "run", recipe, [sample_run.run_record()])
    assert begun(recipe, run_dir).plan.reasons[0].endswith("resumed: the run has none")


class NoSession:
    """Keeps what it is made with, and fails at once."""

    def __init__(self, *parts: Any) -> None:
        (planning,) = (part for part in parts if isinstance(part, Planning))
        NoSession.plans.append(planning.first_plan(frozenset()).plan)

    async def run(self, goes_on: object) -> RunRecord:
        assert goes_on is not None
        return replace(sample_run.run_record(), state="failed", error="no hosts")

    plans: ClassVar[list[Plan]] = []


def test_the_command_resumes_a_run_with_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = Path(shutil.copytree(OLD_RUN, tmp_path / "run"))
    recipe = changed(recipe_of(run_dir), "training", sampler_correction="none")
    monkeypatch.setattr(run, "Session", NoSession)
    told: list[str] = []
    with pytest.raises(LibraError, match="no hosts"):
        run.run(
            recipe,
            Path("elastic.yaml"),
            run_dir,
            resume=True,
            watch=lambda record: None,
            note=told.append,
            certify=lambda run_dir: None,
        )
    assert [line for line in told if "sampler_correction is 'none' and was " in line]
    assert NoSession.plans[-1].reasons[0].startswith("goes on with plan 2")


def test_a_dry_run_of_a_resume_shows_the_plan_that_the_run_had(tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(OLD_RUN, tmp_path / "run"))
    path = tmp_path / "elastic.yaml"
    path.write_text((run_dir / "recipe.json").read_text())
    done = CliRunner().invoke(app, ["run", str(path), "--dry-run", "--resume", str(run_dir)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("plan: goes on with plan 2, the last before")
    with Reader(run_dir) as reader:
        assert len(reader.plans()) == 3, "nothing is written"


def test_secrets_and_a_judges_budget_may_be_others_than_when_the_run_began(tmp_path: Path) -> None:
    def recipe_with(secret: str, requests: int, url: str = "http://127.0.0.1/v1") -> Recipe:
        judge = {"url": url, "model": "m", "budget": {"requests": requests}}
        environment = {"name": "dataset", "args": {"judge": judge}, "secrets": {"KEY": secret}}
        told = elastic.scene().recipe.model_dump()
        return Recipe.model_validate(told | {"environment": [environment]})

    first = sample_run.run_record()
    run_dir = kept(tmp_path / "run", recipe_with("sk-1", 10), [first])
    assert resume.continued(first, recipe_with("sk-2", 99), run_dir)[0].step == first.step
    assert resume.continued(first, recipe_with("sk-2", 10), run_dir)[1] == ()
    with pytest.raises(StateError, match=r"environment\[0\]\.args is .* the policy was trained"):
        resume.continued(first, recipe_with("sk-1", 10, url="http://127.0.0.2/v1"), run_dir)


def test_where_and_how_long_environments_run_may_be_other_than_when_the_run_began(
    tmp_path: Path,
) -> None:
    def recipe_with(**keys: Any) -> Recipe:
        told = elastic.scene().recipe.model_dump()
        return Recipe.model_validate(told | {"environment": {"name": "calculator", **keys}})

    first = sample_run.run_record()
    run_dir = kept(tmp_path / "run", recipe_with(), [first])
    other = recipe_with(tool_timeout_s=99, retries=1, concurrency=2, workers=4)
    assert resume.continued(first, other, run_dir)[0].step == first.step
    with pytest.raises(StateError, match=r"environment\[0\]\.args is \{'stories': True\}"):
        resume.continued(first, recipe_with(args={"stories": True}), run_dir)


def test_a_directory_of_tasks_may_lie_elsewhere_than_when_the_run_began(tmp_path: Path) -> None:
    def recipe_with(tasks: str, **args: Any) -> Recipe:
        told = elastic.scene().recipe.model_dump()
        environment = {"name": "harbor", "args": {"tasks": tasks, "base": "host", **args}}
        return Recipe.model_validate(told | {"environment": environment})

    first = sample_run.run_record()
    run_dir = kept(tmp_path / "run", recipe_with("train"), [first])  # of an older libra
    assert resume.continued(first, recipe_with("/moved/train"), run_dir)[0].step == first.step
    for other in (recipe_with("/moved/test"), recipe_with("/moved/train", names="one")):
        with pytest.raises(
            StateError, match=r"environment\[0\]\.args is .* the policy was trained"
        ):
            resume.continued(first, other, run_dir)


def test_on_other_hosts_a_plan_is_made_anew_and_the_run_goes_on(tmp_path: Path) -> None:
    world = elastic.scene()
    run_dir = kept(tmp_path / "run", world.recipe, [sample_run.run_record(), *world.records])
    told = world.recipe.model_dump()
    told["nodes"][1]["host"] = "elsewhere"
    other = Recipe.model_validate(told)
    resume.continued(sample_run.run_record(), other, run_dir)
    begin = begun(other, run_dir)
    assert begin.plan.reasons[0].endswith("resumed: nodes changed since plan 0")
    assert {slot.node for slot in begin.slots} <= {node.name for node in other.nodes}
    machine = machine_of(other, begin.plan, begin.slots, IDENTITY, resume=_resume(world, run_dir))
    assert machine.handle(e.RunStarted(), now=1.0), "whatever its hosts were before"


def _resume(world: elastic.Scene, run_dir: Path) -> Resume:
    with Reader(run_dir) as reader:
        return Resume("x", world.machine.ledger.position(0), 0, records_in_order(reader))


def changed(recipe: Recipe, section: str, **keys: Any) -> Recipe:
    told = recipe.model_dump()
    told[section] = {**(told[section] or {}), **keys}
    return Recipe.model_validate(told)


@pytest.mark.parametrize(
    ("section", "keys", "why"),
    [
        ("run", {"seed": 9}, "run.seed is 9 and was 0: it draws the tasks"),
        ("rollout", {"group_size": 4}, "rollout.group_size is 4 and was 2: groups that were begun"),
        ("model", {"path": "/other"}, "model.path is '/other' and was '/model': the checkpoint is"),
        ("training", {"lora": {}}, "training.lora is {} and was None: the checkpoint holds these"),
    ],
)
def test_what_must_stay_is_refused_with_the_reason(
    tmp_path: Path, section: str, keys: dict[str, Any], why: str
) -> None:
    recipe = elastic.scene().recipe
    run_dir = kept(tmp_path / "run", recipe, [sample_run.run_record()])
    with pytest.raises(StateError) as told:
        resume.continued(sample_run.run_record(), changed(recipe, section, **keys), run_dir)
    assert f"\n{why}" in str(told.value)
    assert str(run_dir / "recipe.json") in told.value.hint
    assert ("--seed 0" in told.value.hint) == (section == "run")


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("run", {"steps": 999}),
        ("training", {"learning_rate": 0.5, "checkpoint_every": 1, "keep_checkpoints": 7}),
        ("rollout", {"buckets": [{"max_num_seqs": 77}], "max_turns": 3}),
        ("scheduler", {"policy": "round-robin"}),
    ],
)
def test_what_may_change_does(tmp_path: Path, section: str, keys: dict[str, Any]) -> None:
    recipe = elastic.scene().recipe
    run_dir = kept(tmp_path / "run", recipe, [sample_run.run_record()])
    now = changed(recipe, section, **keys)
    _, told = resume.continued(sample_run.run_record(), now, run_dir)
    assert {change.key.split(".")[1].split("[")[0] for change in told} == {*keys}


def with_tasks(tmp_path: Path, rows: int) -> Recipe:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(rows)))
    told = elastic.scene().recipe.model_dump()
    environment = {"name": "dataset", "tasks": [{"path": str(path)}]}
    return Recipe.model_validate(told | {"environment": environment})


def test_a_run_goes_on_with_its_own_tasks_only(tmp_path: Path) -> None:
    recipe, first = with_tasks(tmp_path, 3), sample_run.run_record()
    run_dir = kept(tmp_path / "run", recipe, [first])
    resume.continued(first, with_tasks(tmp_path, 4), run_dir)  # of an older libra: not known
    keep_tasks(recipe, run_dir)
    resume.continued(first, with_tasks(tmp_path, 4), run_dir)
    with pytest.raises(StateError, match=r"the rows of .*tasks\.jsonl are others"):
        resume.continued(first, with_tasks(tmp_path, 5), run_dir)
    (tmp_path / "moved").mkdir()
    resume.continued(first, with_tasks(tmp_path / "moved", 4), run_dir)


def test_another_number_of_sources_is_told_as_such(tmp_path: Path) -> None:
    recipe, first = with_tasks(tmp_path, 3), sample_run.run_record()
    run_dir = kept(tmp_path / "run", recipe, [first])
    keep_tasks(recipe, run_dir)
    told = recipe.model_dump()
    told["environment"]["tasks"] = [*told["environment"]["tasks"]] * 2
    with pytest.raises(StateError, match=r"cannot go on with this recipe") as refused:
        resume.continued(first, Recipe.model_validate(told), run_dir)
    assert "environment[0].tasks" in str(refused.value)


def test_damaged_digests_of_tasks_are_told(tmp_path: Path) -> None:
    recipe, first = with_tasks(tmp_path, 3), sample_run.run_record()
    run_dir = kept(tmp_path / "run", recipe, [first])
    for text in ("{", "3", "[[]]"):
        (run_dir / "tasks.json").write_text(text)
        with pytest.raises(StateError, match=r"tasks\.json cannot be read"):
            resume.continued(first, recipe, run_dir)


def test_a_run_that_wrote_a_step_may_have_a_checkpoint_that_it_never_told_of(
    tmp_path: Path,
) -> None:
    rows: list[Record] = [sample_run.run_record(), sample_run.step_record(1, 5.0)]
    found = resume.last_checkpoint(kept(tmp_path / "run", elastic.scene().recipe, rows))
    assert found.names == ()
    with pytest.raises(StateError, match="has no checkpoint"):
        resume.last_checkpoint(kept(tmp_path / "none", elastic.scene().recipe, rows[:1]))
